"""The benchmark of intervals: the truth of planted attributions, and where a tolerance stops."""

import json

import pytest
import torch

from benchmarks.error_coverage import least_squares, main, stop_images


@pytest.mark.parametrize("known", [True, False])
def test_endless_pairs_give_what_was_planted(known):
    planted = torch.randn(2, 9).double()
    keep = torch.rand(2, 40, 9) < 0.5
    observed = (2 * keep.double() - 1) @ planted[..., None]
    total = planted.sum(1, keepdim=True) if known else None
    found = least_squares(keep, observed, total, torch.rand(2, 40) + 0.5)
    torch.testing.assert_close(found, planted - planted.mean(1, keepdim=True))


def test_a_tolerance_stops_at_the_first_number_of_passes_that_is_precise_from_64_on():
    precision = torch.tensor([0.1, 0.6, 0.4, 0.2]).double().view(1, 4, 1)
    found = stop_images(precision, 2 * precision, [32, 64, 128, 256])
    passes = {"0.3": 256, "0.5": 128, "0.7": 64, "0.9": 64}
    assert {tolerance: one["passes"] for tolerance, one in found.items()} == passes
    assert found["0.5"]["error"] == pytest.approx(2 * found["0.5"]["claimed"]) == pytest.approx(0.8)


@pytest.mark.slow
def test_the_tables_are_printed_again_from_the_file(tmp_path, capsys):
    file = str(tmp_path / "coverage.json")
    few = "--repetitions 2 --pool 40 --limits 1 --passes 16 --fits ranking shapley"
    main([*few.split(), "--output", file])
    printed = capsys.readouterr().out
    assert len(json.loads((tmp_path / "coverage.json").read_text())["numbers"]) == 4
    main(["--read", file])
    assert capsys.readouterr().out == printed
