from functools import partial

import numpy as np
import pytest
import references
import references_faithfulness
import torch
from commands import ROOT
from omegaconf import OmegaConf

from explainers.masking import PatchGrid, masked_forward
from explainers.metrics.curves import CURVES, QUANTITIES, find_needed_sides
from explainers.metrics.perturbation import PerturbationCurves, importance_order, perturbation_sweep

GRID = PatchGrid(image_size=16, patch_size=4)  # 16 patches
BLACK = torch.tensor([-2.0, -1.5, -1.0])[:, None, None]
LABELS = torch.tensor([0, 3, 1, 4, 2])


@pytest.fixture
def logits():
    weight = torch.randn(3 * 16 * 16, 12)
    return lambda images: images.flatten(1) @ weight / 20


@pytest.fixture
def predict(logits):
    return lambda images: logits(images).softmax(-1)


@pytest.fixture
def pictures():
    return torch.randn(5, 3, 16, 16)


@pytest.fixture
def scores():
    return torch.randn(5, 16)


def sweep(logits, images, scores, classes, levels, fill=0.0, **given):
    """`perturbation_sweep` of a function of normalised images."""
    order = importance_order(scores, torch.arange(len(images)))
    return perturbation_sweep(
        lambda keep: masked_forward(logits, images, keep, GRID, fill, chunk_size=7), order, classes, levels, **given
    )


def close(found, expected, **settings):
    """Equal up to the rounding of logits, which are float32: the numbers of a sweep are float64."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, **settings)


@pytest.mark.parametrize("levels", [2, 7])  # 16 patches, so that 7 levels do not fall on whole patches
def test_curves_areas_and_errors_are_the_papers(predict, pictures, logits, scores, levels):
    metric = PerturbationCurves(GRID.num_patches, ("fidelity_plus", "fidelity_minus"), levels)
    metric.update(sweep(logits, pictures, scores, LABELS, levels, BLACK))
    found = metric.compute()
    curves = np.array(
        [references.fidelity_curves(predict, pictures[i], scores[i], LABELS[i], 4, levels, BLACK) for i in range(5)]
    )  # (5, 2, levels)
    for side, name in enumerate(("fidelity_plus", "fidelity_minus")):
        areas = [references.area(curve, 16) for curve in curves[:, side]]
        np.testing.assert_allclose(found[f"{name}_curve"], curves[:, side].mean(0), atol=1e-6)
        np.testing.assert_allclose(found[name], np.mean(areas), atol=1e-6)
        np.testing.assert_allclose(found[f"{name}_error"], np.std(areas, ddof=1) / 5**0.5, atol=1e-6)
    assert found["images"] == 5
    np.testing.assert_allclose(found["sparsity"], [references.level_size(16, levels, i) / 16 for i in range(levels)])


def test_equal_scores_are_in_a_random_order_of_the_image_alone():
    order = importance_order(torch.zeros(400, 3), torch.arange(400))
    counts = torch.nn.functional.one_hot(order[:, 0]).sum(0)
    assert counts.min() > 100  # 133 ± 9 each
    assert order.sort(-1).values.eq(torch.arange(3)).all()
    alone = importance_order(torch.zeros(1, 3), torch.tensor([7]))
    assert torch.equal(alone[0], order[7])


def test_of_unequal_scores_only_the_equal_ones_are_shuffled():
    scores = torch.tensor([[0.2, 0.9, 0.2, -1.0, 0.9, 0.2]]).expand(50, -1)
    order = importance_order(scores, torch.arange(50))
    assert torch.equal(scores.gather(1, order), scores.sort(descending=True).values)
    assert len({tuple(row) for row in order.tolist()}) > 6  # of 12


def test_known_ends_are_not_computed_again(logits, pictures, scores):
    seen, levels = [], 9

    def counted(images):
        seen.append(len(images))
        return logits(images)

    ends = torch.stack([logits(pictures), logits(torch.zeros_like(pictures))], 1)
    known = sweep(counted, pictures, scores, LABELS, levels, ends=ends)
    assert sum(seen) == 5 * (2 * levels - 4)
    close(known, sweep(logits, pictures, scores, LABELS, levels), equal_nan=True)


def slow_outputs(logits, image, scores, label, levels, known):
    """What `perturbation_sweep` records of one image: quantity → (removed, preserved), two lists."""
    outputs = {quantity: ([], []) for quantity in QUANTITIES}
    everything = set(range(16))
    for level in range(levels):
        important = references.top(scores.tolist(), references.level_size(16, levels, level))
        for side, visible in enumerate((everything - important, important)):
            answer = logits(references.only(image, visible, 4)[None])[0].double()
            probability = answer.softmax(-1)[label].item()
            ranking = sorted(range(len(answer)), key=lambda k: -answer[k].item())
            right = [float(label in ranking[:k]) if known else np.nan for k in (1, 5, 10)]
            values = (probability, np.log(probability), answer[label].item(), *right)
            for quantity, value in zip(QUANTITIES, values, strict=True):
                outputs[quantity][side].append(value)
    return outputs


def slow_number(outputs, name, levels, empty):
    """The number of a curve of one image, from its definition in words."""
    first = 0 if empty else 1
    at = [references.level_size(16, levels, level) / 16 for level in range(levels)]

    def area(values, kept):
        values, places = values[kept], at[kept]
        return sum((places[i + 1] - places[i]) * (values[i + 1] + values[i]) / 2 for i in range(len(places) - 1))

    deletion, insertion = slice(0, levels - first), slice(first, levels)
    removed, preserved = outputs["probability"]
    whole = [removed[0]] * levels
    right = outputs["correct"]
    return {
        "fidelity_plus": lambda: area([removed[0] - p for p in removed], deletion),
        "fidelity_minus": lambda: area([removed[0] - p for p in preserved], insertion),
        "deletion": lambda: area(removed, deletion),
        "insertion": lambda: area(preserved, insertion),
        "deletion_accuracy": lambda: area(right[0], deletion),
        "insertion_accuracy": lambda: area(right[1], insertion),
        "positive_perturbation": lambda: area(right[0], deletion),
        "negative_perturbation": lambda: area(right[1], insertion),
        "deletion_accuracy_5": lambda: area(outputs["correct_5"][0], deletion),
        "insertion_accuracy_5": lambda: area(outputs["correct_5"][1], insertion),
        "deletion_accuracy_10": lambda: area(outputs["correct_10"][0], deletion),
        "insertion_accuracy_10": lambda: area(outputs["correct_10"][1], insertion),
        "deletion_aopc": lambda: area(whole, deletion) - area(removed, deletion),
        "insertion_aopc": lambda: area(whole, insertion) - area(preserved, insertion),
        "aopc": lambda: np.mean([removed[0] - p for p in removed[deletion]]),
        "log_odds": lambda: -np.mean([np.log(removed[0] / p) for p in removed[deletion]]),
        "relevance_gain": lambda: area(outputs["logit"][1], insertion) - area(outputs["logit"][0], deletion),
    }[name]()


@pytest.mark.parametrize("empty", [True, False])
def test_every_curve_is_its_definition_in_words(logits, pictures, scores, empty):
    labels, levels = torch.tensor([0, 3, -1, 4, 2]), 7
    outputs = sweep(logits, pictures, scores, LABELS, levels, labels=labels)
    metric = PerturbationCurves(16, list(CURVES), levels, empty)
    metric.update(outputs[:2])
    metric.update(outputs[2:])
    found = metric.compute()
    slow = [slow_outputs(logits, pictures[i], scores[i], LABELS[i], levels, labels[i] >= 0) for i in range(5)]
    for name in CURVES:
        numbers = np.array([slow_number(one, name, levels, empty) for one in slow])
        numbers = numbers[~np.isnan(numbers)]
        assert len(numbers) == (4 if "accuracy" in name or "perturbation" in name else 5)
        assert found[name].item() == pytest.approx(numbers.mean(), abs=1e-6), name
        assert found[f"{name}_error"].item() == pytest.approx(numbers.std(ddof=1) / len(numbers) ** 0.5, abs=1e-6)
        assert found[f"{name}_curve"].shape == (levels,)
    assert found["images"] == 5


@pytest.mark.parametrize("curves", [["aopc", "deletion_accuracy"], ["insertion"], ["relevance_gain"]])
def test_a_side_that_no_curve_needs_is_not_computed(logits, pictures, scores, curves):
    seen = []

    def counted(images):
        seen.append(len(images))
        return logits(images)

    found, whole = PerturbationCurves(16, curves, 6), PerturbationCurves(16, curves, 6)
    sides = find_needed_sides(curves)
    found.update(sweep(counted, pictures, scores, LABELS, 6, labels=LABELS, sides=sides))
    whole.update(sweep(logits, pictures, scores, LABELS, 6, labels=LABELS))
    assert sum(seen) == 5 * (2 + 4 * sum(sides))
    for name, value in whole.compute().items():
        close(found.compute()[name], value)


def test_accuracies_of_images_without_labels_are_left_out(logits, pictures, scores):
    metric = PerturbationCurves(16, ["deletion", "deletion_accuracy"], 4)
    metric.update(sweep(logits, pictures, scores, LABELS, 4))
    assert metric.compute().keys() == {"images", "sparsity", "deletion", "deletion_curve", "deletion_error"}


def test_of_equal_logits_the_first_are_the_highest_and_a_label_of_no_class_is_never_correct():
    answers = torch.tensor([[1.0, 2, 2, 0, 0, 0, 0, 0, 0], [0.0] * 9]).expand(5, -1, -1)
    labels = torch.tensor([1, 2, 7, 12, -1])
    ends = perturbation_sweep(lambda keep: answers, torch.arange(5)[:, None], 0 * labels, 2, labels)
    whole, empty = ends[:, QUANTITIES.index("correct") :, 0].unbind(-1)  # (5, 3) each
    nan = torch.nan
    expected = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0], [nan, nan, nan]])
    close(whole, expected.double(), equal_nan=True)
    expected = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0], [nan, nan, nan]])
    close(empty, expected.double(), equal_nan=True)


def of_pixels(preset, scores, labels, num_classes, until=1.0):
    """What a preset measures of six images of 100 pixels, and the logits of image i with some pixels visible."""
    pixels, images = PatchGrid(image_size=10, patch_size=1), torch.rand(6, 3, 10, 10)
    weight = torch.randn(300, num_classes)

    def model(images):
        return images.flatten(1) @ weight

    def answer(i, visible):
        keep = torch.tensor([pixel in visible for pixel in range(100)]).view(10, 10)
        return model((images[i] * keep)[None])[0]

    predict, order = partial(masked_forward, model, images, grid=pixels), importance_order(scores, torch.arange(6))
    metric = PerturbationCurves(100, preset.curves, preset.levels, preset.empty, until=until)
    metric.update(perturbation_sweep(predict, order, labels, preset.levels, labels, until=until))
    return metric.compute(), answer


@pytest.mark.parametrize("name", ["positive_perturbation", "negative_perturbation"])
def test_the_preset_of_chefer_integrates_what_its_authors_do_and_says_so(name):
    text = (ROOT / "configs/names/metrics.yaml").read_text()
    preset = OmegaConf.create(text).chefer
    assert preset.order == "pixels" and preset.removals == ["black"]
    assert "np.trapz from 0 %" in text and "to 90 %, not divided" in text
    scores, labels = torch.randn(6, 100), torch.tensor([0, 1, 2, 0, 1, 2])
    found, answer = of_pixels(preset, scores, labels, num_classes=3)

    def correct(i):
        return lambda black: answer(i, set(range(100)) - set(black)).argmax() == labels[i]

    slow = [references_faithfulness.chefer(correct(i), scores[i].tolist(), "negative" in name) for i in range(6)]
    assert found[name].item() == pytest.approx(np.mean(slow), abs=1e-6)
    assert 0 < np.mean(slow) < 0.9


@pytest.mark.parametrize("sides", [(True, True), (False, True)])
def test_a_sweep_until_half_is_the_first_half_of_a_whole_one(logits, pictures, scores, sides):
    seen = []

    def counted(images):
        seen.append(len(images))
        return logits(images)

    half = sweep(counted, pictures, scores, LABELS, 5, labels=LABELS, sides=sides, until=0.5)
    assert half.shape == (5, len(QUANTITIES), 2, 5) and sum(seen) == 5 * (2 + 4 * sum(sides))
    whole = sweep(logits, pictures, scores, LABELS, 9, labels=LABELS)
    for side, needed in enumerate(sides):
        expected = whole[:, :, side, :5] if needed else torch.zeros(5, len(QUANTITIES), 4).double()
        close(half[:, :, side, -expected.shape[-1] :], expected)


@pytest.mark.parametrize(("curve", "until"), [("insertion_accuracy_5", 0.5), ("deletion_accuracy_10", 0.3)])
def test_the_preset_of_grad_eclip_removes_and_inserts_half_of_the_pixels(curve, until):
    preset = OmegaConf.load(ROOT / "configs/names/metrics.yaml").grad_eclip
    assert (preset.levels, preset.until, preset.order, preset.removals, preset.classes) == (
        *(11, 0.5, "pixels", ["black"], "label"),
    )
    scores, labels = torch.randn(6, 100), torch.arange(6) * 3
    found, answer = of_pixels(preset, scores, labels, num_classes=20, until=until)

    def rank(i):
        return lambda visible: answer(i, visible).argsort(descending=True, stable=True).tolist().index(labels[i])

    top, inserted = preset.curves.index(curve) // 2, curve.startswith("insertion")
    slow = [
        references_faithfulness.grad_eclip(rank(i), scores[i].tolist(), (1, 5, 10)[top], inserted, until)
        for i in range(6)
    ]
    areas, accuracies = zip(*slow, strict=True)
    assert found[curve].item() == pytest.approx(np.mean(areas), abs=1e-6)
    np.testing.assert_allclose(found[f"{curve}_curve"], np.mean(accuracies, 0), atol=1e-6)
    np.testing.assert_allclose(found["sparsity"], [step * until / 10 for step in range(11)])
