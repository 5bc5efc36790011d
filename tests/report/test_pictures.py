import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import Trainer
from PIL import Image
from toys import SILENT

from datamodules.digits import Digits
from datamodules.images import Images
from explainers import posthoc
from explainers.errors import InputError
from explainers.evaluation import Evaluation, EvaluationModule
from explainers.models.names import class_names
from explainers.report.overlays import overlay
from explainers.report.pictures import Pictures, class_indices, log_curves, log_pictures, read_pictures
from explainers.report.publish import publish


@pytest.fixture(scope="module")
def samples():
    return Digits("test", size=11, image_size=32)


@pytest.fixture
def target(make_target):
    return make_target(num_classes=10)


def collected(folder, target, grid, samples, names=("Chance", "DecompX-PLUS"), batch_size=4, **settings):
    explainers = {name: posthoc.build(name, target, grid) for name in names}
    data = Images(test=lambda: samples, batch_size=batch_size, num_workers=0)
    callback = Pictures(str(folder), "digit", **{"images": 4, "classes": 3, **settings})
    evaluation = EvaluationModule(target, explainers, Evaluation(grid, curves=[]))
    Trainer(accelerator="cpu", inference_mode=False, callbacks=[callback], **SILENT).test(
        evaluation, data, verbose=False
    )
    return read_pictures(folder, "digit", dict.fromkeys(names, ""))


def test_pictures_come_from_all_over_the_test_set_with_every_explainers_heatmaps(tmp_path, target, grid, samples):
    pictures = collected(tmp_path, target, grid, samples)
    assert [picture.name for picture in pictures] == [f"image {i}" for i in (0, 3, 6, 10)]
    method = posthoc.build("DecompX-PLUS", target, grid)
    for picture, index in zip(pictures, (0, 3, 6, 10), strict=True):
        sample = samples[index]
        assert torch.equal(picture.image, sample["image"]) and torch.equal(picture.truth, sample["truth"])
        logits = target(sample["image"][None])[0]
        assert picture.label == str(int(sample["label"]))
        assert list(picture.classes) == [str(number) for number in logits.topk(3).indices.tolist()]
        torch.testing.assert_close(torch.tensor([*picture.classes.values()]), logits.softmax(-1).topk(3).values)
        assert len(picture.heatmaps["Chance"]) == 1  # the same for every class
        for name, heatmap in picture.heatmaps["DecompX-PLUS"].items():
            expected = method(sample["image"][None], torch.tensor([int(name)]))[0]
            torch.testing.assert_close(heatmap, expected, rtol=1e-4, atol=1e-5)


def test_rows_with_heatmaps_of_the_same_images_are_shown_together(tmp_path, target, grid, samples):
    def shown(*keys):
        pictures = read_pictures(tmp_path, "digit", dict(zip(("Chance", "DecompX-PLUS"), keys, strict=True)))
        return len(pictures), pictures[0].signed if pictures else {}

    first = collected(tmp_path, target, grid, samples, names=["DecompX-PLUS"])
    collected(tmp_path, target, grid, samples, names=["Chance"])
    pictures = read_pictures(tmp_path, "digit", {"Chance": "", "DecompX-PLUS": ""})
    (_, heatmaps), (_, expected) = (each.heatmaps.popitem() for each in (pictures[1], first[1]))
    torch.testing.assert_close(heatmaps, expected)
    assert shown("", "") == (4, {"Chance": False, "DecompX-PLUS": True})
    collected(tmp_path, target, grid, samples, names=["Chance"], images=2, keys={"Chance": "of two images"})
    assert shown("of two images", "missing") == (2, {"Chance": False}) and shown("missing", "missing") == (0, {})
    assert shown("", "") == (4, {"Chance": False, "DecompX-PLUS": True})  # nothing is lost


def test_all_heatmaps_of_an_image_have_one_precision(tmp_path, target, grid, samples):
    class Watched(posthoc.DecompX):
        precisions = []

        def forward(self, images, classes):
            self.precisions.append(torch.is_autocast_enabled("cpu"))
            return super().forward(images, classes)

    evaluation = EvaluationModule(target, {"DecompX": Watched(target, grid)}, Evaluation(grid, curves=[]))
    data = Images(test=lambda: samples, batch_size=11, num_workers=0)
    settings = {"precision": "bf16-mixed", "inference_mode": False, "callbacks": [Pictures(str(tmp_path), "digit")]}
    Trainer(accelerator="cpu", **settings, **SILENT).test(evaluation, data, verbose=False)
    assert Watched.precisions == [True] * 3


@pytest.mark.slow
def test_chosen_classes_are_explained_for_every_image_and_drawn_side_by_side(tmp_path, target, grid, samples):
    target.classes = [f"Digit {number}" for number in range(10)]
    pictures = collected(tmp_path, target, grid, samples, images=2, classes=["digit 7", 1])
    method = posthoc.build("DecompX-PLUS", target, grid)
    for picture, index in zip(pictures, (0, 10), strict=True):
        assert list(picture.classes) == ["Digit 7", "Digit 1"] and list(picture.heatmaps["Chance"]) == ["Digit 7"]
        for name, heatmap in picture.heatmaps["DecompX-PLUS"].items():
            expected = method(samples[index]["image"][None], torch.tensor([int(name[-1])]))[0]
            torch.testing.assert_close(heatmap, expected, rtol=1e-4, atol=1e-5)
    written = {"results": {"digit": {"DecompX-PLUS": {}, "Chance": {}}}, "columns": {}}
    (tmp_path / "results.json").write_text(json.dumps(written))
    publish(tmp_path, [tmp_path / "results.json"], every_class=True)
    with Image.open(tmp_path / "digit.png") as drawn:
        assert drawn.height > drawn.width  # four rows of three columns


@pytest.mark.parametrize(("classes", "named"), [(["zebre"], "zebre"), (["zebra", 1], "zebra"), ([], "none")])
def test_classes_that_do_not_exist_or_are_named_twice_are_refused(classes, named):
    with pytest.raises(InputError, match=named):
        class_indices(classes, ["African elephant", "zebra", "tench"])


class Tables:
    """In place of Lightning's logger of W&B: keeps the tables."""

    def __init__(self):
        self.tables = {}

    def log_table(self, key, columns, data):
        assert all(len(row) == len(columns) for row in data)
        self.tables[key] = (columns, data)


def test_weights_and_biases_shows_pictures_and_curves(tmp_path, target, grid, samples):
    pictures, logger = collected(tmp_path, target, grid, samples), Tables()
    log_pictures(logger, "digit", pictures)
    columns, rows = logger.tables["digit/pictures"]
    assert columns == ["name", "label", "class", "image", "Chance", "DecompX-PLUS"]
    assert [row[0] for row in rows] == ["image 0", "image 3", "image 6", "image 10"]
    shown = torch.from_numpy(np.array(rows[1][5].image)).permute(2, 0, 1)
    heatmap = next(iter(pictures[1].heatmaps["DecompX-PLUS"].values()))
    assert torch.equal(shown, overlay(pictures[1].image, heatmap, signed=True))
    curve = {"sparsity": [0.0, 1.0], "fidelity_plus": 0.5, "fidelity_plus_curve": [0.0, 0.75]}
    log_curves(logger, "digit", {"one": curve, "other": curve})
    assert logger.tables["digit/curves"] == (
        ["explainer", "sparsity", "fidelity_plus_curve"],
        [["one", 0.0, 0.0], ["one", 1.0, 0.75], ["other", 0.0, 0.0], ["other", 1.0, 0.75]],
    )
    log_curves(logger, "nothing", {"one": {}})
    assert "nothing/curves" not in logger.tables


def fake_target(classes=(), count=3, of=3):
    backbone = SimpleNamespace(num_classes=of, pretrained_cfg={})
    return SimpleNamespace(score="softmax", classes=list(classes), num_classes=count, backbone=backbone)


@pytest.mark.parametrize(
    ("of_head", "of_images", "name"),
    [
        (["cat", "dog", "bird"], ["x", "y", "z"], "dog"),  # a head knows what it tells apart
        ([], ["x", "y", "z"], "y"),
        ([], ["x", "y"], "class 1"),  # of another task
        ([], [], "class 1"),
        (["n01440764", "n01443537", "n02012849"], [], "goldfish"),
    ],
)
def test_classes_have_the_names_of_the_explained_model(of_head, of_images, name):
    assert class_names(fake_target(of_head), of_images)[1] == name


def test_classes_of_imagenet_have_readable_and_different_names():
    names = class_names(fake_target(count=1000, of=1000))
    assert names[1] == "goldfish" and len(set(names)) == 1000
