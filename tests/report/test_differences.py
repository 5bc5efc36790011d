import csv
import io
import json

import pytest
import torch
from scipy.stats import ttest_rel

from explainers.errors import InputError
from explainers.metrics.means import ImageScores
from explainers.report.differences import compare_pairs, difference_tables
from explainers.report.publish import publish
from explainers.report.results import write_scores

TITLES = {"deletion": "Deletion ↓", "masks": "Masks", "accuracy": "Accuracy ↑"}


@pytest.fixture
def scores():
    """`a` and `b` differ by .1 on 30 images of very different difficulty; `late` lacks an image, `single` has one."""
    images = 5 * torch.rand(30)
    row = {"a": images, "b": images + 0.1 + 0.05 * torch.randn(30), "late": images + torch.randn(30)}
    row["late"][3] = torch.nan
    row["single"] = torch.full((30,), torch.nan)
    row["single"][0] = 9.0
    return ImageScores(
        torch.arange(30), {name: {"deletion": values, "masks": values.clone()} for name, values in row.items()}
    )


@pytest.fixture
def results(scores):
    rows = {name: {key: values.nanmean().item() for key, values in row.items()} for name, row in scores.rows.items()}
    return {"odd": rows | {"old": {"deletion": 1.0}}, "loop": {"a": {"deletion": 0.5}}}


@pytest.fixture
def tables(results, scores):
    return lambda minus=None: difference_tables(results, compare_pairs(results, {"odd": scores}, TITLES), TITLES, minus)


def rows(table):
    legend, empty, header, _, *lines = table.splitlines()
    names, *cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in (header, *lines))
    return legend, [dict(zip(names, row, strict=True)) for row in cells]


def test_every_explainer_is_compared_with_the_best_or_with_the_named_one(tables, scores):
    legend, lines = rows(tables()["differences.md"])
    assert "minus the best of the task in each column" in legend and "p < 0.05, corrected for all pairs" in legend
    cells = {line["Explainer"]: line["Deletion ↓"] for line in lines}
    low = min((name for name in ("a", "b", "late")), key=lambda name: scores.rows[name]["deletion"].nanmean())
    assert cells[low] == "0" and cells["old"] == cells["single"] == "–" and "Masks" not in lines[0]
    legend, lines = rows(tables("a")["differences.md"])
    assert legend.startswith("Each explainer minus a, on the same images; ± half of the 95 % interval")
    cells = {line["Explainer"]: line for line in lines}
    assert cells["b"]["Deletion ↓"].startswith("+0.") and cells["b"]["Deletion ↓"].endswith(" *")
    assert not cells["late"]["Deletion ↓"].endswith("*") and cells["b"]["Masks"] == cells["b"]["Deletion ↓"]


def test_the_csv_file_has_every_pair_unrounded(tables, scores):
    lines = list(csv.DictReader(io.StringIO(tables()["differences.csv"])))
    assert [(line["explainer"], line["minus"]) for line in lines] == [("a", "b"), ("a", "late"), ("b", "late")] * 2
    line = lines[0]
    peer = ttest_rel(scores.rows["a"]["deletion"].double(), scores.rows["b"]["deletion"].double())
    assert float(line["p"]) == pytest.approx(peer.pvalue) and float(line["p_holm"]) == pytest.approx(3 * peer.pvalue)
    assert [float(line["low"]), float(line["high"])] == pytest.approx(list(peer.confidence_interval()))
    assert (line["task"], line["number"], line["images"]) == ("odd", "deletion", "30") and lines[1]["images"] == "29"


def test_without_scores_there_are_no_differences_and_an_unknown_name_is_refused(results, tables):
    assert difference_tables(results, compare_pairs(results, {}, TITLES), TITLES) == {}
    with pytest.raises(InputError, match=r"^expected differences from one of a, b, late, single, old, got .*=x: name"):
        tables("x")


def test_differences_are_published_and_those_of_earlier_settings_removed(results, scores, tmp_path, capsys):
    content = {"results": results, "columns": dict.fromkeys(results, TITLES)}
    (tmp_path / "results.json").write_text(json.dumps(content))
    write_scores(tmp_path / "results.json", {"odd": scores})
    publish(tmp_path, [tmp_path / "results.json"], minus="b")
    assert "minus b" in (tmp_path / "differences.md").read_text() and (tmp_path / "differences.csv").exists()
    assert '"explainers":[0,1,2,3],"mean":[[0.0,' in (tmp_path / "gallery.html").read_text()
    write_scores(tmp_path / "results.json", {})
    publish(tmp_path, [tmp_path / "results.json"], minus="b")
    assert "differences: no file of results keeps the numbers of images" in capsys.readouterr().out
    assert not list(tmp_path.glob("differences.*"))
