"""The program that compares options of a training step runs, and changes only what an option names."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import throughput
from benchmarks.throughput import Option

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def modules():
    """Both explainers of one tiny target, in training."""
    built = throughput.build("tiny", ["plain", *throughput.CASES], "", 10, CPU)
    return throughput.trainings("tiny", built, CPU)


@pytest.mark.slow
def test_every_option_is_measured_beside_the_step_as_it_is(capsys):
    once = ["--rounds", "1", "--threads", "1", "--device", "cpu", "--backend", "eager"]
    throughput.main(["--target", "tiny", *once])
    head, *printed = capsys.readouterr().out.strip().split("\n\n")
    assert head.endswith("1 threads, tiny")
    tables = [
        [line.strip("| ").split(" | ") for line in text.splitlines()[2:]] for text in printed if text.startswith("|")
    ]
    assert [text for text in printed if not text.startswith("|")] == [
        f"{case}, {precision}" for precision in ("float32", "bf16") for case in throughput.CASES.values()
    ]
    compiled, *compared = tables
    assert [int(graphs) for *_, graphs in compiled] == [1, 1, 0, 0, 1, 0]  # of the first size, of any size, of one
    assert [len(table) for table in compared] == [6, 4, 4, 4]
    for table in compared:
        assert table[0][0] == "as it is" and table[0][2] == "1.00 (1.00, 1.00)" and table[0][3] == "0"
        assert all(float(row[1]) > 0 for row in table)
    for table in compared[:2]:
        assert all(row[3] == "–" or float(row[3]) < 1e-5 for row in table)
    for table in compared[2:]:
        assert all(1e-5 < float(row[3]) < 0.1 for row in table[1:])


def test_an_option_changes_a_step_and_then_restores_the_target(modules):
    module, batch = modules["light"], throughput.random_batch(2, 64, CPU)
    backbone, expected = module.explainer.target.backbone, Option("as it is").rows(module, batch)
    seen = []

    def embed(images):
        seen.append(torch.is_autocast_enabled("cpu"))
        return torch.zeros(len(images), 48)

    option = Option("", target={"embed": embed}, images=torch.channels_last, autocast=True)
    rows = option.rows(module, batch)
    assert not rows["meta"].any() and seen == [True]
    assert rows["image"].is_contiguous(memory_format=torch.channels_last)
    assert module.explainer.target.backbone is backbone and "embed" not in vars(module.explainer.target)
    for name, row in Option("as it is").rows(module, batch).items():
        assert torch.equal(row, expected[name])


def test_the_first_round_is_not_counted_and_options_take_turns(modules, monkeypatch):
    order, taken = [], iter([9.0, 9.0, 1.0, 3.0, 2.0, 2.0, 4.0, 8.0])

    def seconds(option, *_):
        order.append(option.name)
        return next(taken)

    monkeypatch.setattr(throughput, "seconds", seconds)
    group = [Option("a"), Option("b", optimizer={"foreach": True})]
    rows = list(throughput.compare(modules["light"], group, throughput.random_batch(2, 64, CPU), rounds=3))
    assert order == ["a", "b"] * 4
    assert rows == [["a", "2000", "1.00 (1.00, 1.00)", "0"], ["b", "3000", "2.00 (1.00, 3.00)", "–"]]


def test_operations_of_a_step_are_extrapolated_from_few_images(modules, monkeypatch):
    monkeypatch.setattr(throughput, "seconds", lambda *_: 0.5)
    module, batch = modules["anyhead"], throughput.random_batch(8, 64, CPU)
    Option("").loss(module, batch)  # calibrates the network
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        Option("").loss(module, batch).backward()
    images, milliseconds, count, speed, relative = map(float, throughput.achieved(module, batch, 1, rate=1e9))
    assert (images, milliseconds) == (8, 500)
    assert count == pytest.approx(counter.get_total_flops() / 1e12, rel=1e-2)
    assert speed == pytest.approx(count / 0.5, rel=1e-2) and relative == pytest.approx(speed * 1e3, rel=1e-2)


def test_the_rate_of_a_product_counts_two_operations_for_each_of_its_terms(monkeypatch):
    clock = iter(range(20))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))
    assert throughput.matmul_rate(CPU, side=4) == 2 * 4**3
