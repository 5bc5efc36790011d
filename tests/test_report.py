import csv
import io

from explainers.report import comma_separated, draw_curves, markdown

FOUND = {
    "images": 3,
    "sparsity": [0.0, 0.5, 1.0],
    "fidelity_plus": 0.4321,
    "fidelity_plus_error": 0.0123,
    "fidelity_plus_curve": [0.0, 0.4, 0.5],
    "fidelity_minus": 0.1,
    "fidelity_minus_error": 0.02,
    "fidelity_minus_curve": [0.5, 0.1, 0.0],
    "images_per_second": 12.345,
}
RESULTS = {"odd": {"tve": FOUND | {"rank_correlation": 0.5}, "oracle": FOUND}, "loop": {"tve": FOUND}}


def test_the_table_has_a_row_for_each_task_and_explainer_with_errors_where_they_are_known():
    header, rule, *lines = markdown(RESULTS).splitlines()
    assert [cell.strip() for cell in header.strip("| ").split("|")] == [
        "Task",
        "Explainer",
        "Fidelity⁺ ↑",
        "Fidelity⁻ ↓",
        "ρ with the oracle ↑",
        "Images/s ↑",
    ]
    assert set(rule) <= set("|- ")
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    assert cells[0] == ["odd", "tve", "0.432 ± 0.012", "0.100 ± 0.020", "0.500", "12.3"]
    assert cells[1] == ["odd", "oracle", "0.432 ± 0.012", "0.100 ± 0.020", "–", "12.3"]
    assert cells[2][0] == "loop"


def test_what_nobody_measured_has_no_column():
    assert "Hit rate" not in markdown(RESULTS)


def test_the_csv_file_holds_every_number_unrounded():
    rows = list(csv.DictReader(io.StringIO(comma_separated(RESULTS))))
    assert [(row["task"], row["explainer"]) for row in rows] == [("odd", "tve"), ("odd", "oracle"), ("loop", "tve")]
    assert float(rows[0]["fidelity_plus"]) == FOUND["fidelity_plus"]
    assert rows[1]["rank_correlation"] == ""


def test_curves_are_drawn_for_every_task(tmp_path):
    draw_curves(RESULTS, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
