import csv
import io
import re

from commands import ROOT
from omegaconf import OmegaConf

from explainers.evaluation import Evaluation
from explainers.evaluation.measurement import list_columns
from explainers.evaluation.probes import PROBES
from explainers.metrics.agreement import AGREEMENTS
from explainers.metrics.curves import CURVES
from explainers.metrics.localization import LOCALIZATIONS
from explainers.posthoc import method_names
from explainers.report.tables import Reference, format_csv, latex, markdown, rows
from explainers.running.targets import named_options

GROUPS = ("data", "explainers")

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
RESULTS = {"odd_one": {"light": FOUND | {"rank_correlation": -0.5}, "oracle": FOUND}, "loop": {"light": FOUND}}
TITLES = {
    "fidelity_plus": "Fidelity⁺ ↑",
    "fidelity_minus": "Fidelity⁻ ↓",
    "pointing_game": "Hit rate ↑",
    "rank_correlation": "ρ with the reference ↑",
    "images_per_second": "Images/s ↑",
}
PRINTED = {
    "ViT-Base": {
        "odd_one": {
            "light": {"fidelity_plus": 0.4, "fidelity_minus": 0.355, "pointing_game": 0.9},
            "lime": {"rank_correlation": 1.0},
        }
    },
    "Swin-Base": {},
}
REFERENCE = Reference("paper", "ViT-Base", PRINTED)


def cells(line):
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_the_table_has_a_row_for_each_task_and_explainer_with_errors_where_they_are_known():
    header, rule, *lines = markdown(rows(RESULTS, TITLES)).splitlines()
    wanted = ["Task", "Explainer", "Fidelity⁺ ↑", "Fidelity⁻ ↓", "ρ with the reference ↑", "Images/s ↑"]
    assert cells(header) == wanted
    assert set(rule) <= set("|- ")
    assert cells(lines[0]) == ["odd_one", "light", "0.432 ± 0.012", "0.100 ± 0.020", "-0.500", "12.3"]
    assert cells(lines[1]) == ["odd_one", "oracle", "0.432 ± 0.012", "0.100 ± 0.020", "–", "12.3"]
    assert cells(lines[2])[0] == "loop"


def test_the_csv_file_holds_every_number_unrounded():
    lines = list(csv.DictReader(io.StringIO(format_csv(RESULTS))))
    wanted = [("odd_one", "light"), ("odd_one", "oracle"), ("loop", "light")]
    assert [(row["task"], row["explainer"]) for row in lines] == wanted
    assert float(lines[0]["fidelity_plus"]) == FOUND["fidelity_plus"]
    assert lines[1]["rank_correlation"] == ""


def test_latex_has_the_same_cells_with_its_own_signs():
    lines = latex(rows(RESULTS, TITLES)).splitlines()
    assert lines[1] == r"\begin{tabular}{llrrrr}" and lines[-1] == r"\end{tabular}"
    found = [line.removesuffix(r" \\").split(" & ") for line in lines if line.endswith(r"\\")]
    header = ["Task", "Explainer", r"Fidelity$^{+}$ $\uparrow$", r"Fidelity$^{-}$ $\downarrow$"]
    assert found[0][:4] == header
    assert found[1] == [r"odd\_one", "light", r"0.432 $\pm$ 0.012", r"0.100 $\pm$ 0.020", "$-$0.500", "12.3"]
    assert found[2][:2] == ["", "oracle"] and found[2][4] == "--"
    assert [line for line in lines if "rule" in line] == [r"\toprule", r"\midrule", r"\midrule", r"\bottomrule"]
    assert not re.search(r"[^\x00-\x7f]", latex(rows(RESULTS, TITLES, REFERENCE)))  # pdflatex knows no other signs


def test_a_reference_adds_columns_that_name_its_source_and_target():
    header, _, *lines = markdown(rows(RESULTS, TITLES, REFERENCE)).splitlines()
    wanted = ["Fidelity⁺ ↑", "Fidelity⁺ ↑ paper, ViT-Base", "Fidelity⁻ ↓", "Fidelity⁻ ↓ paper, ViT-Base"]
    assert cells(header)[2:6] == wanted
    assert (cells(lines[0])[3], cells(lines[0])[5]) == ("0.40", "0.355")
    assert all((cells(line)[3], cells(line)[5]) == ("–", "–") for line in lines[1:])
    lines = list(csv.DictReader(io.StringIO(format_csv(RESULTS, REFERENCE))))
    assert [row["fidelity_minus (paper, ViT-Base)"] for row in lines] == ["0.355", "", ""]


def test_every_name_of_the_papers_values_is_that_of_a_row_and_a_number(tmp_path):
    """What `tasks=[...]`, `explainers=[...]`, `methods=[...]` and the settings of an evaluation take."""
    files = {group: {path.stem for path in (ROOT / f"configs/{group}").glob("*.yaml")} for group in GROUPS}
    tasks, explainers = files["data"] | named_options("data").keys(), files["explainers"]
    values = OmegaConf.load(ROOT / "configs/reference/paper.yaml")["values"]
    settings = {"curves": list(CURVES), "probes": list(PROBES), "localization": list(LOCALIZATIONS)}
    settings |= {"agreement": list(AGREEMENTS), "removals": ["zero", "black", "drop"]}
    numbers = list_columns(Evaluation(**settings))
    for of_target in values.values():
        assert of_target.keys() <= tasks
        for rows_of_task in of_target.values():
            assert {name.partition("(")[0] for name in rows_of_task} <= explainers | set(method_names())
            for printed in rows_of_task.values():
                assert printed.keys() <= numbers.keys()


def test_tables_show_the_names_of_methods_and_csv_has_the_keys_of_results():
    results = {"odd": {"anyhead_ft": FOUND, "tve": FOUND, "kernel_shap": FOUND}}
    assert [row["Explainer"] for row in rows(results, TITLES)] == ["AnyHead-ft", "TVE", "kernel_shap"]
    assert [line.split(",")[1] for line in format_csv(results).splitlines()[1:]] == list(results["odd"])
