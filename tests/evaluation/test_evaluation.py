import copy
import json

import numpy as np
import pytest
import references
import timm
import torch
from commands import NO_FIGURES, QUIET
from commands import evaluate as evaluate_command
from lightning import Trainer
from scipy.stats import spearmanr
from torch import nn
from torch.utils.data import DataLoader
from toys import SILENT

from datamodules.digits import Digits
from explainers import Details
from explainers.evaluation import Evaluation, EvaluationModule
from explainers.evaluation.measurement import list_columns
from explainers.evaluation.probes import PROBES
from explainers.posthoc import RISE, ViTCX
from explainers.posthoc.baselines import Chance
from explainers.saved.identity import weights_hash
from explainers.shapley.kernel_shap import KernelSHAP
from explainers.tve.oracle import Oracle
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.projections import simplex
from explainers.vectors.self_explaining import SelfExplaining

LEVELS = 6  # of 16 patches: not a divisor


@pytest.fixture(scope="module")
def digits():
    return Digits("test", size=7, image_size=32)


@pytest.fixture
def target(make_target):
    return make_target(num_classes=10)


def both(target, grid):
    return {"chance": Chance(None, grid), "oracle": Oracle(target, grid, hops=0)}


def build(target, explainers, measured=None, **settings):
    return EvaluationModule(target, explainers, Evaluation(**{"grid": target.grid, "levels": 3} | settings), measured)


def measure(evaluation, samples, batch_size=7):
    """The evaluation after a test, and what it logged."""
    trainer = Trainer(accelerator="cpu", inference_mode=False, **SILENT)
    trainer.test(evaluation, DataLoader(samples, batch_size=batch_size), verbose=False)
    return evaluation, trainer.callback_metrics


def evaluate(target, grid, samples, names=("chance", "oracle"), batch_size=3, **settings):
    explainers = {name: explainer for name, explainer in both(target, grid).items() if name in names}
    evaluation, logged = measure(build(target, explainers, levels=LEVELS, **settings), samples, batch_size)
    return evaluation.results, logged


def by_hand(target, grid, samples, explain, classes, fill=0.0):
    """Mean areas, their standard errors, the hit rate and all heatmaps, one image after the other."""
    areas, hit, heatmaps = [], 0, []
    for sample in samples:
        image = target.normalise(sample["image"][None])[0]
        label = target(sample["image"][None])[0].argmax().item() if classes == "predicted" else sample["label"].item()
        heatmap = explain(sample["image"], image, label)
        curves = references.fidelity_curves(target.score_images, image, heatmap, label, 4, LEVELS, fill)
        areas.append([references.area(curve, 16) for curve in curves])
        row, column = divmod(heatmap.argmax().item(), 4)
        hit += sample["truth"][8 * row + 4, 8 * column + 4].item()
        heatmaps.append(heatmap)
    return np.mean(areas, 0), np.std(areas, 0, ddof=1) / len(areas) ** 0.5, hit / len(areas), heatmaps


@torch.no_grad()
@pytest.mark.parametrize(("classes", "removal"), [("predicted", "zero"), ("label", "black")])
def test_results_are_those_computed_by_hand(target, grid, digits, classes, removal):
    results, logged = evaluate(target, grid, digits, classes=classes, removals=[removal], reference="oracle")
    assert results.keys() == {"chance", "oracle"}
    chance = Chance(None, grid)
    slow = {
        "chance": lambda pixels, image, label: chance(pixels[None], None)[0],
        "oracle": lambda pixels, image, label: references.attribution(target.score_images, image, label, 4, hops=0),
    }
    fill = -1.0 if removal == "black" else 0.0  # this target's mean and standard deviation are 0.5
    heatmaps = {}
    for name, explain in slow.items():
        areas, errors, hit_rate, heatmaps[name] = by_hand(target, grid, digits, explain, classes, fill)
        found = results[name]
        assert [found["fidelity_plus"], found["fidelity_minus"]] == pytest.approx(areas.tolist(), abs=1e-5)
        assert [found["fidelity_plus_error"], found["fidelity_minus_error"]] == pytest.approx(errors.tolist(), abs=1e-5)
        assert found["pointing_game"] == pytest.approx(hit_rate)
        assert found["images"] == 7
        assert len(found["fidelity_plus_curve"]) == len(found["sparsity"]) == LEVELS
        assert logged[f"{name}/fidelity_plus"].item() == pytest.approx(areas[0], abs=1e-5)
    agreement = [spearmanr(a.flatten(), b.flatten()).statistic for a, b in zip(*heatmaps.values(), strict=True)]
    assert results["chance"]["rank_correlation"] == pytest.approx(np.mean(agreement), abs=1e-5)
    assert "rank_correlation" not in results["oracle"]  # the reference is not compared with itself
    right = [target(sample["image"][None]).argmax().item() == sample["label"] for sample in digits]
    assert logged["accuracy"].item() == pytest.approx(np.mean(right))


def test_what_was_not_measured_is_left_out(target, grid, digits):
    """The pointing game of images without objects, the comparison without a reference."""
    bare = [{name: value for name, value in sample.items() if name != "truth"} for sample in digits]
    timed = evaluate(target, grid, bare)[0]["chance"]
    assert not {"pointing_game", "rank_correlation"} & timed.keys() and "fidelity_plus" in timed
    assert timed["images_per_second"] > 0


def test_several_removals_have_columns_of_their_own(target, grid, digits):
    curves = ["fidelity_plus", "deletion_accuracy"]
    both, _ = evaluate(target, grid, digits, curves=curves, removals=["black", "drop"])
    alone, _ = evaluate(target, grid, digits, curves=curves, removals=["drop"])
    for name in curves:
        assert both["oracle"][f"{name}_drop_curve"] == pytest.approx(alone["oracle"][f"{name}_curve"])
    titles = list_columns(Evaluation(grid, curves=curves, removals=["black", "drop"]))
    assert titles["fidelity_plus"] == "Fidelity⁺ ↑" and titles["fidelity_plus_drop"] == "Fidelity⁺ ↑ (drop)"


def test_all_numbers_have_titles_or_are_curves_and_errors(target, grid, digits):
    probes = ["saco", "max_sensitivity", "randomisation"]
    evaluation = build(target, both(target, grid), probes=probes, reference="oracle")
    measure(evaluation, digits, batch_size=4)
    row, before = evaluation.results["chance"], weights_hash(target)
    assert row.keys() >= {*probes, "rank_correlation", "forward_passes", "images_per_second"}
    without_title = {name for name in row if name not in evaluation.columns}
    others = {"images", "sparsity", "ignores_classes"}
    assert all(name in others or name.endswith(("_error", "_sd", "_curve")) for name in without_title)
    assert row["max_sensitivity"] > 0.5 and row["randomisation"] == pytest.approx(row["randomisation"])
    assert weights_hash(target) == before
    passes = evaluation.forward_passes
    assert passes["perturbations"] == 1 + 2 * (2 * 3 - 4) + 2 * 10


def test_scores_are_the_numbers_of_single_images_in_the_order_of_the_data(target, grid, digits):
    settings = {"removals": ["zero", "black"], "probes": ["saco"], "reference": "oracle", "k": 3}
    scores = measure(build(target, both(target, grid), **settings), [digits[i] for i in (5, 1)])[0].scores
    assert scores.index.tolist() == [1, 5]
    names = {"fidelity_plus", "relevance_gain_black", "saco", "pointing_game", "rank_correlation"}
    assert names <= scores.rows["chance"].keys() and "rank_correlation" not in scores.rows["oracle"]
    for place, image in enumerate(scores.index.tolist()):
        alone = measure(build(target, both(target, grid), **settings), [digits[image]])[0].results
        for name, row in scores.rows.items():
            assert row.keys() == scores.rows[name].keys() and row["saco"].dtype == torch.float32
            found = {number: values[place].item() for number, values in row.items()}
            assert found == pytest.approx({number: alone[name][number] for number in row}, abs=1e-5)


def test_forward_passes_are_announced_as_they_are_made(target, grid, digits, monkeypatch):
    evaluation = build(target, {"rise": RISE(target, grid, masks=9)}, levels=5, until=0.5, probes=list(PROBES))
    made, forward = [], target.backbone.forward_features
    monkeypatch.setattr(target.backbone, "forward_features", lambda x: made.append(len(x)) or forward(x))
    measure(evaluation, digits)
    announced = evaluation.forward_passes
    assert announced["rise"] == 9 and announced["explanations of probes"] == 6 * 9
    assert sum(made) == 7 * sum(announced.values()) + 1  # and an empty image for each batch


def test_passes_in_results_are_those_that_were_made_and_without_curves_nothing_is_masked(target, grid, digits):
    explainers = {"cx": ViTCX(target, grid), "rise": RISE(target, grid, masks=9), "chance": Chance(None, grid)}
    evaluation = build(target, explainers, curves=[])
    measure(evaluation, digits, batch_size=4)
    images = torch.stack([sample["image"] for sample in digits])
    masks = sum(len(own) for own in explainers["cx"].masks(target.normalise(images)))
    passes = {name: row["forward_passes"] for name, row in evaluation.results.items()}
    assert passes == {"cx": round(2 + 2 * masks / 7), "rise": 9, "chance": 0}
    assert passes["cx"] < explainers["cx"].forward_passes == 2 * 24 + 2
    chance = evaluation.results["chance"]
    assert evaluation.forward_passes["perturbations"] == 1
    assert "fidelity_plus" not in chance and chance["images_per_second"] > 0


class OneRow(nn.Module):
    """Its heatmaps have one top patch, its saliency maps one top row of another patch; its images have masks."""

    def forward(self, images, classes):
        return self.details(images, classes).heatmaps

    def details(self, images, classes):
        heatmaps, pixels = torch.zeros(len(images), 4, 4), torch.zeros(len(images), 32, 32)
        heatmaps[:, 3, 0] = 1.0
        pixels[:, 13] = 1.0 + torch.arange(32) / 32
        return Details(heatmaps, pixels, {"masks": torch.arange(len(images)) + 60})


@torch.no_grad()
def test_saliency_maps_are_removed_and_located_pixel_by_pixel_where_a_method_has_them(target, grid, digits):
    explainers = {"row": OneRow(), "chance": Chance(None, grid)}
    found = {}
    for order in ("pixels", "saliency"):
        evaluation = build(target, explainers, curves=["deletion"], levels=33, order=order)
        measure(evaluation, digits)
        found[order] = evaluation.results
    row, images = found["saliency"]["row"], torch.stack([sample["image"] for sample in digits])
    normalised, classes = target.normalise(images), target(images).argmax(1)
    normalised[..., 13, :] = 0  # the first level removes 32 pixels: this row
    expected = target.score_images(normalised).take_along_dim(classes[:, None], 1).mean().item()
    assert row["deletion_curve"][1] == pytest.approx(expected, abs=1e-5)
    for order, (x, y) in {"saliency": (13, 31), "pixels": (28, 4)}.items():
        hit_rate = sum(sample["truth"][x, y].item() for sample in digits) / 7
        assert found[order]["row"]["pointing_game"] == pytest.approx(hit_rate)
    chances = [{key: row["chance"][key] for key in ("deletion", "pointing_game")} for row in found.values()]
    assert chances[0] == chances[1]
    assert row["masks"] == 63 and "masks" not in found["saliency"]["chance"]
    assert evaluation.columns["masks"] == "Masks" and evaluation.settings.identity()["order"] == "saliency"


def test_only_what_is_asked_for_is_measured_beside_the_reference(target, grid, digits):
    evaluation = build(target, both(target, grid), ["chance"], reference="oracle")
    measure(evaluation, digits, batch_size=4)
    assert evaluation.results.keys() == {"chance"}
    whole, _ = evaluate(target, grid, digits, reference="oracle")
    assert evaluation.results["chance"]["rank_correlation"] == pytest.approx(whole["chance"]["rank_correlation"])


def command(*overrides, folder, tasks=("digit",)):
    """`python eval.py` of chance on a tiny target."""
    chosen = [
        f"+tasks.{task}={{data: {{_target_: datamodules.images.Images, num_workers: 0, batch_size: 2, "
        "test: {_target_: datamodules.digits.Digits, _partial_: true, split: test, size: 3, image_size: 64}}}"
        for task in tasks
    ]
    common = ("target=tiny", "evaluation.levels=3", *NO_FIGURES, *QUIET)
    evaluate_command(*common, *chosen, *overrides, folder=folder)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    command(folder=folder)
    return folder


@pytest.fixture
def no_model(monkeypatch):
    create = timm.create_model

    def without_weights(*args, **settings):
        """On `meta`, where settings that follow from a model are read off."""
        return create(*args, **settings) if torch.empty(0).is_meta else pytest.fail("built the target")

    monkeypatch.setattr(timm, "create_model", without_weights)


@pytest.mark.slow
def test_rows_of_the_same_settings_are_not_measured_again_and_others_are_kept(evaluated, capsys, monkeypatch):
    def results():
        return json.loads((evaluated / "results.json").read_text())["results"]

    first = results()
    built = []
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *args, **kwargs: built.append(1) or create(*args, **kwargs))
    command(folder=evaluated, tasks=("digit", "another"))
    assert built == [1] and "digit: not measured again: chance" in capsys.readouterr().out
    assert results()["digit"] == first["digit"] and results().keys() == {"digit", "another"}
    command("evaluation.levels=4", folder=evaluated)
    assert "chance on digit: measured again, its settings differ: evaluation.levels: 3 → 4" in capsys.readouterr().out
    assert results()["digit"] != first["digit"] and len(built) == 2
    command(folder=evaluated)
    assert results() == first and len(built) == 2
    command("fresh=true", folder=evaluated)
    assert len(built) == 3 and len([*(evaluated / "rows/digit").glob("*.json")]) == 2


@pytest.mark.slow
def test_tables_and_figures_are_drawn_again_without_a_model(evaluated, no_model, tmp_path, capsys):
    files = f"results.files=[{evaluated / 'results.json'}]"
    evaluate_command(files, "reference=paper", "figures=[bars]", folder=tmp_path)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    assert "reference: the paper has values of ViT-Base for " in capsys.readouterr().out
    assert "Fidelity" in (tmp_path / "table.md").read_text() and "tabular" in (tmp_path / "table.tex").read_text()
    assert not (tmp_path / "results.json").exists()
    with pytest.raises(SystemExit, match="error: nothing to draw: .*results.files"):
        evaluate_command("results.files=[]", folder=tmp_path)


def test_self_explaining_models_are_compared_with_the_reference_and_classify(target, grid, digits):
    own = copy.deepcopy(target)
    own.head = FixedHead(simplex(10, own.embed_dim))
    explaining, exact = SelfExplaining(own, grid), KernelSHAP(target, grid, budget=40)
    agreement = ["e_rmse", "iou", "rank_correlation"]
    settings = {"classes": "label", "reference": "exact", "agreement": agreement, "k": 3}
    explainers = {"explaining": explaining, "exact": exact}
    evaluation, _ = measure(build(target, explainers, **settings), digits, batch_size=3)
    found = evaluation.results["explaining"]
    images, labels = torch.stack([sample["image"] for sample in digits]), digits.labels
    with torch.no_grad():
        ours, theirs = explaining(images, labels), exact(images, labels)
        logits = explaining.predict_and_explain(images)[0]
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    assert found["e_rmse"] == pytest.approx((ours - theirs).square().mean().sqrt().item(), rel=1e-4)
    tops = [[{*each.flatten().topk(3).indices.tolist()} for each in heatmaps] for heatmaps in (ours, theirs)]
    overlaps = [len(a & b) / len(a | b) for a, b in zip(*tops, strict=True)]
    assert found["iou"] == pytest.approx(sum(overlaps) / 7)
    assert "accuracy" not in evaluation.results["exact"] and "e_rmse" not in evaluation.results["exact"]
