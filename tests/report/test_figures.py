import csv
import inspect
import json
import math

import numpy as np
import pytest
from commands import composed
from hydra.utils import get_method
from matplotlib.colors import to_hex

from benchmarks.papers.approximation import approximation_scatter
from benchmarks.papers.figures import ablation_bars, fidelity_bars, fidelity_curves, ranking
from benchmarks.papers.radar import radar
from benchmarks.papers.run_figures import (
    cost_of_tasks,
    lambda_sweeps,
    loss_curves,
    quality_against_passes,
    theorem_1,
    throughput_bars,
)
from explainers.errors import InputError
from explainers.report.labels import choose_colours
from explainers.running.targets import named_options


def found(plus, minus):
    return {
        "sparsity": [0.0, 0.5, 1.0],
        "fidelity_plus": plus,
        "fidelity_plus_error": plus / 10,
        "fidelity_plus_curve": [0.0, plus, 2 * plus],
        "fidelity_minus": minus,
        "fidelity_minus_error": abs(minus) / 10,
        "fidelity_minus_curve": [2 * minus, minus, 0.0],
    }


TITLES = {"fidelity_plus": "Fidelity⁺ ↑", "fidelity_minus": "Fidelity⁻ ↓", "deletion": "Deletion ↓"}
TITLES |= {"masks": "Masks", "images_per_second": "Images/s ↑"}
RESULTS = {
    "odd": {"chance": found(0.2, 0.3), "light": found(0.5, 0.1)},
    "loop": {"oracle": found(0.6, 0.0), "light": found(0.4, -0.1), "chance": found(0.3, 0.3)},
}
MORE = {"masks": 7, "images_per_second": 9.0}
MANY = {
    task: {name: row | MORE | {"deletion": 1 - row["fidelity_plus"]} for name, row in explainers.items()}
    for task, explainers in RESULTS.items()
}
STUDY = {"subsets": [16, 32], "attribution": [0.0, 1.0, 2.0]}
STUDY |= {"expectation_16": [0.1, 0.2, 0.3], "pearson_16": 1.0, "spearman_16": 1.0}
STUDY |= {"expectation_32": [0.3, 0.2, 0.1], "pearson_32": -1.0, "spearman_32": -1.0}
DRAWN = {
    "curves": lambda: fidelity_curves(RESULTS),
    "bars": lambda: fidelity_bars(RESULTS),
    "ranking": lambda: ranking(MANY, TITLES, ["deletion", "fidelity_plus"]),
    "radar": lambda: radar(MANY, TITLES),
    "ablation": lambda: ablation_bars(RESULTS, ["chance", "light"]),
    "study": lambda: approximation_scatter({"digits": {"two_point": STUDY}, "others": RESULTS["odd"]}),
}


def bars(axis, names):
    """Height, error and colour of every bar, by the name at its place."""
    (errors,) = [container for container in axis.containers if hasattr(container, "has_yerr")]
    segments = errors.lines[2][0].get_segments()  # empty where the error is not known
    lengths = [(segment[1, 1] - segment[0, 1]) / 2 if len(segment) else math.nan for segment in segments]
    return {
        names[round(bar.get_x() + bar.get_width() / 2)]: (bar.get_height(), error, to_hex(bar.get_facecolor()))
        for bar, error in zip(axis.patches, lengths, strict=True)
    }


@pytest.mark.parametrize("name", DRAWN)
def test_every_figure_can_be_drawn_and_its_ticks_do_not_overlap(name):
    figure = DRAWN[name]()
    figure.draw_without_rendering()
    for axis in figure.axes[:2]:
        places = [tick.get_window_extent() for tick in axis.get_yticklabels() if tick.get_visible()]
        assert all(low.y1 < high.y0 for low, high in zip(places, places[1:], strict=False))


def test_curves_have_a_column_for_each_task_and_one_colour_for_each_explainer():
    figure = fidelity_curves(RESULTS)
    upper_left, upper_right, lower_left, lower_right = figure.axes
    assert [axis.get_title() for axis in (upper_left, upper_right)] == ["odd", "loop"]
    lines = {line.get_label(): line for line in lower_right.lines}
    assert lines.keys() == {"oracle", "light", "chance"}
    assert lines["light"].get_xydata().tolist() == [[0.0, -0.2], [0.5, -0.1], [1.0, 0.0]]
    colours = [{line.get_label(): line.get_color() for line in axis.lines} for axis in figure.axes]
    assert colours[0].items() <= colours[1].items()
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == ["chance", "light", "oracle"]


def test_bars_are_the_areas_with_their_errors_and_a_missing_explainer_leaves_a_gap():
    figure = fidelity_bars(RESULTS)
    names = [label.get_text() for label in figure.axes[-1].get_xticklabels()]
    drawn = [bars(axis, names) for axis in figure.axes]
    assert [list(panel) for panel in drawn] == [["chance", "light"], ["chance", "light", "oracle"]] * 2
    for panel, (task, side) in zip(drawn, [(t, s) for s in ("plus", "minus") for t in RESULTS], strict=True):
        for name, (height, error, colour) in panel.items():
            numbers = RESULTS[task][name]
            assert height == numbers[f"fidelity_{side}"]
            assert error == pytest.approx(numbers[f"fidelity_{side}_error"])
            assert colour == to_hex(choose_colours(["chance", "light", "oracle"])[name])


def test_any_number_is_ranked_with_its_errors_and_the_best_on_top():
    figure = ranking(MANY, TITLES, ["deletion", "fidelity_plus"])
    deletion, plus = figure.axes[2:]
    assert [axis.get_title() for axis in figure.axes] == ["Deletion ↓", "Fidelity⁺ ↑"] * 2
    assert [label.get_text() for label in deletion.get_yticklabels()] == ["chance", "light", "oracle"]
    assert deletion.get_ylabel() == "loop"
    ((points, _, (bars_of_errors,)),) = plus.containers
    np.testing.assert_allclose([*points.get_xdata()], [0.3, 0.4, 0.6])
    np.testing.assert_allclose([np.ptp(each[:, 0]) / 2 for each in bars_of_errors.get_segments()], [0.03, 0.04, 0.06])
    assert plus.lines[-1].get_xdata() == [0.3, 0.3]  # chance


def test_a_radar_has_an_axis_for_each_number_from_the_worst_to_the_best_explainer():
    odd, loop = radar(MANY, TITLES).axes
    labels = [label.get_text() for label in loop.get_xticklabels()]
    assert labels == [
        "Fidelity⁺ ↑\n0.300 → 0.600",
        "Fidelity⁻ ↓\n0.300 → -0.100",  # lower is better
        "Deletion ↓\n0.700 → 0.400",
    ]
    radii = {line.get_label(): line.get_ydata() for line in loop.lines}
    np.testing.assert_allclose(radii["chance"], [0.25] * 4)
    np.testing.assert_allclose(radii["oracle"], [1, 0.25 + 0.75 * 3 / 4, 1, 1])
    np.testing.assert_allclose(radii["light"], [0.5, 1, 0.5, 0.5])
    styles = [{line.get_label(): (line.get_color(), line.get_marker()) for line in axis.lines} for axis in (odd, loop)]
    assert styles[0].items() <= styles[1].items() and len(set(styles[1].values())) == 3
    (only,) = radar({"odd": MANY["odd"]}, TITLES, explainers=["light"]).axes
    np.testing.assert_allclose(only.lines[0].get_ydata(), 1)  # the worst is the best


def test_ablations_are_means_over_the_tasks_with_the_errors_of_the_means():
    axis = ablation_bars(RESULTS, ["light", "chance"]).axes[0]
    drawn = bars(axis, [label.get_text() for label in axis.get_xticklabels()])
    assert list(drawn) == ["light", "chance"]
    for name, (height, error, colour) in drawn.items():
        values = [RESULTS[task][name]["fidelity_plus"] for task in RESULTS]
        errors = [RESULTS[task][name]["fidelity_plus_error"] for task in RESULTS]
        assert height == pytest.approx(sum(values) / 2)
        assert error == pytest.approx(math.sqrt(errors[0] ** 2 + errors[1] ** 2) / 2)
        assert colour == to_hex(choose_colours(["chance", "light", "oracle"])[name])  # as in the other figures


THEOREM = [(0.9, 1.8, 0.47, 0.1), (0.5, 1.5, 0.43, 0.2), (0.1, 0.5, 0.2, 0.4)]
"""Error, bound, epsilon and the share of patches of three epochs."""


@pytest.fixture
def log(tmp_path):
    """As Lightning writes it: rows of training and of validation, each with empty cells."""
    names = [f"val/theorem1_{name}" for name in ("error", "bound", "epsilon", "covered")]
    rows = [{"step": step, "train/loss": loss} for step, loss in zip((9, 19, 29, 39), (4, 1, 4, 7), strict=True)]
    rows += [{"epoch": epoch, "step": 9} | dict(zip(names, found, strict=True)) for epoch, found in enumerate(THEOREM)]
    path = tmp_path / "metrics.csv"
    with open(path, "w") as file:
        writer = csv.DictWriter(file, ["epoch", "step", "train/loss", *names])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_losses_are_drawn_faint_and_as_running_means_of_what_there_is(log):
    (axis,) = loss_curves({"TVE-FT": log, "scratch": log}, window=3).axes
    raw, mean, *others = axis.lines
    assert raw.get_xydata().tolist() == [[9, 4], [19, 1], [29, 4], [39, 7]] and raw.get_alpha() < 0.5
    np.testing.assert_allclose(mean.get_ydata(), [(4 + 1) / 2, (4 + 1 + 4) / 3, (1 + 4 + 7) / 3, (4 + 7) / 2])
    assert raw.get_color() == mean.get_color() != others[0].get_color()
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["TVE-FT", "scratch"]
    assert np.isfinite(loss_curves({"a": log}, window=99).axes[0].lines[1].get_ydata()).all()


def test_theorem_1_shows_error_bound_epsilon_and_how_many_patches_they_are_of(log):
    (axis,) = theorem_1(log).axes
    drawn = [line.get_xydata().tolist() for line in axis.lines]
    assert drawn == [[[epoch, row[i]] for epoch, row in enumerate(THEOREM)] for i in range(4)]


@pytest.mark.parametrize(
    ("draw", "name", "content"),
    [
        (lambda file: loss_curves({"a": file}), "nowhere.csv", None),
        (lambda file: loss_curves({"a": file}), "empty.csv", ""),
        (lambda file: loss_curves({"a": file}), "short.csv", "step,train/loss\n9,\n"),
        (throughput_bars, "x.json", '{"machine": {}}'),
    ],
)
def test_a_file_without_the_numbers_is_named(draw, name, content, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=name):
        draw(tmp_path / name)


@pytest.fixture
def benchmark(tmp_path):
    path = tmp_path / "explain.json"
    throughput = {"vit_base": {"light": 100.0, "lime": 4.0}, "vit_large": {"light": 96.0}}
    tasks = {"tasks": {"10": 5.0, "2": 3.0}, "tasks_one_by_one": {"2": 4.0, "10": 20.0}}
    path.write_text(json.dumps({"machine": {}, "throughput": throughput} | tasks))
    return path


def test_agreement_is_drawn_against_forward_passes_as_a_line_and_points(tmp_path):
    numbers = {"shap_9": (0.5, 0.2), "shap_3": (0.9, 0.1), "before": (3.0, -0.2), "after": (1.0, 0.3)}
    task = {name: {"relative_error": error, "rank_correlation": rho} for name, (error, rho) in numbers.items()}
    chosen = {"shap_9": 9, "shap_3": 3}, ["before", "after"]
    figure = quality_against_passes({"a": task | {"chance": {}}, "b": task}, *chosen)
    assert [axis.get_title() for axis in figure.axes[:2]] == ["a", "b"]
    errors, correlations = figure.axes[0], figure.axes[2]
    assert errors.lines[0].get_xydata().tolist() == [[3, 0.9], [9, 0.5]]
    assert correlations.lines[0].get_xydata().tolist() == [[3, 0.1], [9, 0.2]]
    assert [errors.lines[i].get_xydata().tolist() for i in (1, 3)] == [[[1, 3.0]], [[1, 1.0]]]
    overlap = {name: numbers | {"iou_5": numbers["rank_correlation"] / 2} for name, numbers in task.items()}
    figure = quality_against_passes({"a": overlap}, *chosen)
    assert [axis.get_ylabel().split(" ")[0] for axis in figure.axes] == ["error", "ρ", "IoU@5"]
    assert figure.axes[2].lines[0].get_xydata().tolist() == [[3, 0.05], [9, 0.1]]


def write_sweep(folder, *rows):
    columns = ["lambda_1", "lambda_2", "accuracy", "e_rmse", "iou", "rank_correlation", "kept", "chosen"]
    lines = [",".join(f"sweep/{name}" for name in columns), *(",".join(map(str, row)) for row in rows)]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.csv").write_text("\n".join(lines))


@pytest.mark.parametrize("labels", [True, False])
def test_a_sweep_is_drawn_against_lambda_2_with_the_chosen_point(labels, tmp_path):
    measured = [(0.0, 0.9, 3.0, 0.1, -0.1, 1.0), (0.5, 0.8, 1.0, 0.3, 0.2, 0.9), (0.5, 0.6, 0.9, 0.2, 0.1, 0.7)]
    unchanged, first, second = (row if labels else (row[0], math.nan, *row[2:]) for row in measured)
    write_sweep(tmp_path, (1, *unchanged, 0), (1, *first, 1), (0.5, *unchanged, 0), (0.5, *second, 0))
    figure = lambda_sweeps({"small": str(tmp_path / "metrics.csv")})
    for i, axis in zip((1 if labels else 5, 2, 3, 4), figure.axes, strict=True):
        drawn = [line.get_xydata().tolist() for line in axis.lines]
        two = [[[row[0], row[i]] for row in (unchanged, last)] for last in (first, second)]  # values of lambda_1
        assert drawn == [*two, [[0.5, first[i]]]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["small", "chosen point"]


def test_the_jobs_of_a_sweep_are_one_curve_whose_best_point_is_chosen(tmp_path):
    """A job has the unchanged model and its own point, and chooses one of them."""
    unchanged = (1, 0.0, 0.9, 3.0, 0.1, -0.1, 1.0)
    write_sweep(tmp_path / "job,b", (*unchanged, 0), (1, 0.5, 0.9, 2.0, 0.2, 0.1, 1.0, 1))
    write_sweep(tmp_path / "job,a", (*unchanged, 0), (1, 1.0, 0.9, 1.0, 0.3, 0.2, 0.9, 1))
    write_sweep(tmp_path / "job,c", (*unchanged, 1), (1, 1.5, 0.1, 0.5, 0.4, 0.3, 0.9, 0))
    curve, star = lambda_sweeps({"target": str(tmp_path / "job,*/metrics.csv")}).axes[3].lines
    assert curve.get_xydata().tolist() == [[0, -0.1]] * 3 + [[0.5, 0.1], [1, 0.2], [1.5, 0.3]]
    assert star.get_xydata().tolist() == [[1, 0.2]]


def test_throughput_has_a_bar_for_each_method_at_its_target_and_cost_a_line_over_the_number_of_tasks(benchmark):
    (axis,) = throughput_bars(benchmark).axes
    drawn = {
        container.get_label(): [(round(bar.get_x() + bar.get_width() / 2), bar.get_height()) for bar in container]
        for container in axis.containers
    }
    assert drawn == {"light": [(0, 100.0), (1, 96.0)], "lime": [(0, 4.0)]} and axis.get_yscale() == "log"
    assert [label.get_text() for label in axis.get_xticklabels()] == ["vit_base", "vit_large"]
    (axis,) = cost_of_tasks(benchmark).axes
    assert [line.get_xydata().tolist() for line in axis.lines] == [[[2, 3.0], [10, 5.0]], [[2, 4.0], [10, 20.0]]]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["2", "10"]


def test_every_option_of_the_figures_composes_and_fits_its_function(tmp_path):
    options = ["default", *named_options("figures")]
    cfg = composed(f"figures=[{','.join(options)}]", folder=tmp_path, config="eval")
    assert len(cfg.figures) == len(options) - 1  # all but the default, which is two others
    for node in cfg.figures.values():
        inspect.signature(get_method(node["_target_"])).bind(**{key: None for key in node if key != "_target_"})
