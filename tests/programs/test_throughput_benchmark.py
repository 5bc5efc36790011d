"""The program that compares options of a training step runs, and changes only what an option names."""

import pytest
import torch

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
    precisions = throughput.list_precisions("cpu")
    head, *printed = capsys.readouterr().out.strip().split("\n\n")
    assert head.endswith("1 threads, tiny")
    tables = [
        [line.strip("| ").split(" | ") for line in text.splitlines()[2:]] for text in printed if text.startswith("|")
    ]
    assert [text for text in printed if not text.startswith("|")] == [
        f"{case}, {precision}" for precision in precisions for case in throughput.CASES.values()
    ]
    compiled, *compared = tables
    assert [int(graphs) for *_, graphs in compiled] == [1, 1, 0, 0, 1, 0]  # of the first size, of any size, of one
    assert [len(table) for table in compared] == [6, 4, 4, 4][: 2 * len(precisions)]
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
