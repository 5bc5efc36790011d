"""The program that compares options of a training step runs, and changes only what an option names."""

import pytest
import torch

from benchmarks import throughput

CPU = torch.device("cpu")


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
