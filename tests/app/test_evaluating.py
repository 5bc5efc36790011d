"""`explainers.evaluate` computes what an evaluation computes, without Lightning, for any function that explains."""

import numpy as np
import pytest
import torch
from conftest import timm_model
from lightning import Trainer
from PIL import Image
from torch.utils.data import DataLoader
from toys import SILENT

import explainers
from explainers.app import evaluating
from explainers.evaluation import Evaluation, EvaluationModule
from explainers.evaluation.measurement import Measurement
from explainers.evaluation.probes import PROBES
from explainers.evaluation.result import CURVES
from explainers.masking import select_most_important
from explainers.metrics.perturbation import importance_order
from explainers.models import TargetModel
from explainers.models.removal import masked_scores
from explainers.posthoc import GAE

PIXELS = np.random.default_rng(1).integers(0, 256, (5, 40, 32, 3), dtype=np.uint8)


def edges(images, classes):
    """A plain function that explains: the contrast of each patch of 8 × 8 pixels."""
    return images.float().mean(1).unfold(1, 8, 8).unfold(2, 8, 8).flatten(3).std(-1)


def test_a_plain_function_takes_part_in_everything_with_and_without_lightning(target, grid, images):
    def method(images, classes):
        return edges(images, classes) + target(images).gather(-1, classes[:, None])[..., None]

    measured = {"method": method, "GAE": GAE(target, grid)}
    settings = Evaluation(grid, levels=4, reference="GAE", probes=list(PROBES), removals=["zero", "drop"])
    measurement, module = (
        Measurement(target, measured, settings).in_one_process(),
        EvaluationModule(target, measured, settings),
    )
    for part in images.split(2):
        measurement.update({"image": part})
    results, scores = measurement.summarise()
    samples = [{"image": image, "label": -1, "index": number} for number, image in enumerate(images)]
    trainer = Trainer(accelerator="cpu", inference_mode=False, **SILENT)
    trainer.test(module, DataLoader(samples, batch_size=2), verbose=False)
    for name, row in module.results.items():
        assert results[name] == row | {"images_per_second": results[name]["images_per_second"]}
        torch.testing.assert_close(scores.rows[name], module.scores.rows[name])
    assert {*PROBES, "rank_correlation", "fidelity_plus_drop"} <= results["method"].keys()
    assert results["method"]["forward_passes"] == 1


def test_functions_names_and_explainers_are_measured_beside_chance_and_print_as_a_table(tmp_path):
    model = timm_model()
    for number, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    result = explainers.evaluate(model, {"edges": edges, "attention": "GAE"}, tmp_path, levels=5)
    assert isinstance(result, explainers.EvaluationResult)
    assert list(result.numbers) == ["Chance", "edges", "attention"] and len(result.images) == 5
    assert result.transform["size"] == (32, 32)
    rows = repr(result).splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["Chance", "edges", "attention"] and rows[2].count("±") == 2
    for name, row in result.numbers.items():
        for curve in CURVES:
            assert row[curve] == pytest.approx(result.scores[name][curve].mean().item(), abs=1e-6)
    again = explainers.evaluate(model, [edges, "GAE"], list(PIXELS), levels=5)
    assert list(again.numbers) == ["Chance", "edges", "GAE"]
    assert again.numbers["edges"]["fidelity_plus"] == pytest.approx(result.numbers["edges"]["fidelity_plus"], abs=1e-6)


def enlarge(heatmaps):
    return heatmaps.repeat_interleave(8, 1).repeat_interleave(8, 2)


WAYS = {
    "NumPy": lambda images, classes: edges(images, classes).numpy(),
    "views": lambda images, classes: np.flip(np.flip(edges(images, classes).double().numpy(), 1).copy(), 1),
    "list of arrays": lambda images, classes: [*edges(images, classes).numpy()],
    "graph": lambda images, classes: edges(images, classes).requires_grad_(),
    "pixels": lambda images, classes: enlarge(edges(images, classes)).numpy(),
    "channel": lambda images, classes: enlarge(edges(images, classes))[:, None],
}


def test_heatmaps_of_other_tools_are_measured_as_they_come(recwarn):
    model, photos, kept = timm_model(as_target=True), [*PIXELS], []
    explainers.evaluate(model, [lambda *of: kept.append(edges(*of)) or kept[-1]], photos, levels=5)
    of_images = torch.cat(kept)
    saved = {"array": of_images.numpy(), "list": [*of_images], "saved pixels": enlarge(of_images)}
    result = explainers.evaluate(model, {"edges": edges, **WAYS, **saved}, photos, levels=5)
    for name in (*WAYS, *saved):
        for curve in CURVES:
            assert torch.allclose(result.scores[name][curve], result.scores["edges"][curve], atol=1e-5), name
    said = [str(each.message) for each in recwarn if "averaged" in str(each.message)]
    line = ": heatmaps at pixels are averaged over 4 × 4 patches"
    assert said == [f"{name}{line}" for name in ("pixels", "channel", "saved pixels")]
    assert result.numbers["array"]["forward_passes"] == 0 and "array" in repr(result)
    for name in ("NumPy", "views", "list of arrays", "graph"):
        found = explainers.explain(photos[0], model, method=WAYS[name]).heatmap
        torch.testing.assert_close(found, of_images[0])


def test_saved_heatmaps_stay_with_their_images_where_a_file_is_broken(tmp_path, monkeypatch):
    for number, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_bytes(b"broken")
    heatmaps = np.random.default_rng(0).random((5, 4, 4))
    monkeypatch.setattr(evaluating, "BATCH", 2)
    with pytest.warns(UserWarning, match="left out: 1 file"):
        result = explainers.evaluate(timm_model(), {"saved": heatmaps}, tmp_path, levels=5)
    kept = [0, 2, 3, 4]
    expected = explainers.evaluate(timm_model(), {"saved": heatmaps[kept]}, [PIXELS[each] for each in kept], levels=5)
    torch.testing.assert_close(result.scores["saved"], expected.scores["saved"])


@pytest.mark.situation(14)
@pytest.mark.parametrize("score", ["sigmoid", "value"])
def test_curves_are_those_of_the_score(score, images, grid):
    target = TargetModel(timm_model(num_classes=1 if score == "value" else 3), score=score).eval()
    photo = Image.fromarray(images[0].permute(1, 2, 0).numpy())
    result = explainers.evaluate(target, {"edges": edges}, photo, levels=3, curves=["deletion", "insertion"])
    seen = target.transform(photo)[None]
    normalised, chosen = target.normalise(seen), target(seen).argmax(-1)
    order = importance_order(edges(seen, chosen).flatten(1), torch.tensor([0]))
    hidden = select_most_important(order, 3)
    with torch.no_grad():
        kept = masked_scores(target, normalised, chosen, torch.cat([~hidden, hidden], 1), grid)[0]
    removed, preserved = kept.split(3)
    assert result.numbers["edges"]["deletion"] == pytest.approx(torch.trapezoid(removed, dx=0.5).item(), abs=1e-4)
    assert result.numbers["edges"]["insertion"] == pytest.approx(torch.trapezoid(preserved, dx=0.5).item(), abs=1e-4)


def test_the_class_that_is_wanted_is_measured():
    model = timm_model(as_target=True)
    one, each = (
        explainers.evaluate(model, [edges], list(PIXELS), classes=classes, levels=5, curves=["deletion"])
        for classes in (3, ["class 3", 3, 3, 3, 1])
    )
    scores = [result.scores["edges"]["deletion"] for result in (one, each)]
    assert torch.equal(scores[0][:4], scores[1][:4]) and scores[0][4] != scores[1][4]
