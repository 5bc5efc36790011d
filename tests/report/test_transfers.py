"""The matrix of transfers between tasks: its numbers, its table, its picture and what it refuses."""

import json
import math

import numpy as np
import pytest
from scipy.stats import norm, pearsonr

from benchmarks.papers.transfers import correlation, similarity
from explainers.errors import InputError

PAIRS = {
    ("a", "b"): (0.1, 3.0),
    ("a", "c"): (0.2, 2.0),
    ("b", "c"): (0.3, 2.5),
    ("c", "a"): (0.4, 1.0),
    ("c", "c"): (1.0, 0.5),
}
"""(Source, target) → cosine, E-RMSE after the transfer."""


NUMBERS = ("e_rmse", "rank_correlation", "accuracy")


@pytest.fixture
def folder(tmp_path):
    """What a sweep over source and target tasks leaves; c was added to itself."""
    for (source, target), (cosine, error) in PAIRS.items():
        numbers = {"untouched/e_rmse": 4.0, "transferred/e_rmse": error}
        numbers |= {"untouched/accuracy": 0.9, "transferred/accuracy": 0.9 - cosine / 10}
        numbers |= {"untouched/rank_correlation": 0.1, "transferred/rank_correlation": 0.5 - error / 10}
        write(tmp_path / source / target, {f"test/{name}": value for name, value in numbers.items()}, cosine)
    return tmp_path


def write(run, metrics, cosine):
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.json").write_text(json.dumps(metrics | {"val/cosine": cosine, "val/curvature": 2 * cosine}))


def test_every_transfer_is_a_number_in_its_row_and_column(folder):
    figure = similarity(folder, paper=-0.32)
    gains, accuracies, cosines, curvatures, scatter, of_gains, _, of_accuracies = figure.axes
    expected = {
        gains: {pair: 0.4 - error / 10 for pair, (_, error) in PAIRS.items()},
        accuracies: {pair: -cosine / 10 for pair, (cosine, _) in PAIRS.items()},
        cosines: {pair: cosine for pair, (cosine, _) in PAIRS.items()},
        curvatures: {pair: 2 * cosine for pair, (cosine, _) in PAIRS.items()},
    }
    for axis, numbers in expected.items():
        assert [label.get_text() for label in axis.get_yticklabels()] == list("abc")
        drawn = axis.images[0].get_array().filled(math.nan)
        for row, source in enumerate("abc"):
            for column, target in enumerate("abc"):
                value = numbers.get((source, target), math.nan)
                assert drawn[row, column] == pytest.approx(value, nan_ok=True)
        texts = {("abc"[text.get_position()[1]], "abc"[text.get_position()[0]]): text.get_text() for text in axis.texts}
        assert texts == {pair: f"{value:.2f}" for pair, value in numbers.items()}
    points = [tuple(point) for line in scatter.lines for point in line.get_xydata().tolist()]
    assert sorted(points) == sorted(PAIRS[pair] for pair in PAIRS if pair != ("c", "c"))  # none onto itself
    r = np.corrcoef([0.1, 0.2, 0.3, 0.4], [3.0, 2.0, 2.5, 1.0])[0, 1]
    assert scatter.get_title().startswith(f"r = {r:.2f} [") and scatter.get_title().endswith("; paper: -0.32")
    assert of_gains.get_title().startswith(f"r = {-r:.2f} [") and "paper" not in of_gains.get_title()
    assert of_accuracies.get_title().startswith("r = -1.00 [")
    assert (of_accuracies.get_xlabel(), of_accuracies.get_ylabel()) == ("curvature", "change of accuracy")


def test_the_table_has_a_row_for_each_transfer_and_both_correlations(folder, tmp_path):
    similarity(folder, table=tmp_path / "similarity.md")
    lines = (tmp_path / "similarity.md").read_text().splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == ["a", "b", "0.100", "0.200", "4.000 → 3.000", "0.100 → 0.200", "0.100", "0.900 → 0.890"]
    assert "Of 4 transfers between different tasks:" in lines
    assert lines[-4].startswith("- cosine of the task vectors and E-RMSE after the transfer: r = -0.83, 95 % interval")


def test_the_interval_is_that_of_fisher():
    generator = np.random.default_rng(0)
    x = generator.normal(size=12)
    y = -0.5 * x + generator.normal(size=12)
    peer = pearsonr(x, y)
    r, low, high, p = correlation(x, y)
    assert r == pytest.approx(peer.statistic)
    assert (low, high) == pytest.approx(tuple(peer.confidence_interval(0.95)), abs=1e-6)
    assert p == pytest.approx(2 * norm.sf(abs(np.arctanh(r)) * 3))
    assert p == pytest.approx(peer.pvalue, abs=0.02)  # by Student's distribution
    assert correlation([1, 2, 3, 4], [2, 4, 6, 8])[0] == pytest.approx(1)
    with np.errstate(invalid="ignore"):
        assert math.isnan(correlation([1, 2, 3, 4], [1, 1, 1, 1])[3])


def test_transfers_that_are_missing_or_without_numbers_are_named(folder):
    both = [f"test/{which}/{name}" for which in ("untouched", "transferred") for name in NUMBERS]
    for metrics, named in (({"val/cosine": 0.3}, "b/c/metrics.json"), (dict.fromkeys(both, 1.0), "b/c/metrics.json")):
        (folder / "b/c/metrics.json").write_text(json.dumps(metrics))
        with pytest.raises(InputError, match=named):
            similarity(folder)
    (folder / "b/c/metrics.json").unlink()
    with pytest.raises(InputError, match="got 3"):
        similarity(folder)
