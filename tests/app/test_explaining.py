"""One call explains any image with any model, and says what it took."""

import gc
import math
import pickle
import warnings
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from conftest import TINY_VIT, timm_model
from PIL import Image
from torch import nn
from toys import LIGHT, equal, state

import explainers
from explainers import PreparedExplainer, posthoc
from explainers.app import choosing
from explainers.app.choosing import choose_batch_size
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.images.transform import ImageTransform
from explainers.masking import mask_pixels
from explainers.models import TargetModel, as_target
from explainers.models.names import class_names, find_image_classes
from explainers.report.overlays import draw_annotated
from explainers.share import catalogue
from explainers.tve import TVE

pytestmark = pytest.mark.usefixtures("nothing_shipped")
PIXELS = np.random.default_rng(1).integers(0, 256, (40, 32, 3), dtype=np.uint8)
IMAGE = Image.fromarray(PIXELS)
SQUARE = ImageTransform((32, 32), crop_pct=0.9)(IMAGE)[None]  # as timm's config of the tiny ViT says


@pytest.fixture
def passes(monkeypatch):
    """Counts the images that any target embeds."""
    counted = []
    for name in ("embed", "embed_with_maps"):
        embed = getattr(TargetModel, name)
        monkeypatch.setattr(
            TargetModel, name, lambda self, x, *blocks, embed=embed: counted.append(len(x)) or embed(self, x, *blocks)
        )
    return counted


def planted(row, column, side=4, size=16):
    """A module whose second class is the red of one patch of 64 × 64 images."""

    class Planted(nn.Module):
        def forward(self, images):
            rows, columns = (slice(place * size, (place + 1) * size) for place in (row, column))
            red = images[:, 0, rows, columns].mean((1, 2)) - images[:, 2].mean((1, 2))
            return torch.stack([torch.zeros_like(red), 4 * red], 1)

    return as_target(Planted(), mean=0.5, std=0.5, image_size=side * size)


@pytest.mark.parametrize("turned", [False, True])
def test_the_heatmap_peaks_where_the_model_looks_after_resizing_cropping_and_turning(tmp_path, turned):
    """The middle 128 × 128 of a landscape of 256 × 128 pixels is seen at half the size: patches have 32 pixels."""
    target = planted(row=1, column=3)
    side = target.grid.shape[0]
    pixels = np.full((128, 256, 3), 60, np.uint8)
    pixels[32:64, 64 + 96 : 64 + 128] = (250, 10, 10)
    exif = Image.Exif()
    if turned:
        exif[0x0112] = 8  # to be turned by 90° against the clock
        pixels = np.ascontiguousarray(np.rot90(pixels, -1))
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    explanation = explainers.explain(tmp_path / "a.png", target, classes=1, method="Occlusion")
    part = side // 4
    peak = divmod(int(explanation.heatmap.argmax()), side)
    assert (peak[0] // part, peak[1] // part) == (1, 3)
    assert explanation.image.shape == (3, 64, 64) and explanation.image[0, 16:32, 48:].float().mean() > 240


@torch.no_grad()
def test_an_explanation_holds_what_the_model_and_the_explainer_say(target, anyhead):
    explanation = explainers.explain(IMAGE, target, method=anyhead, top=2)
    image = explanation.image[None]
    probabilities = target(image).softmax(-1)[0]
    assert [each.index for each in explanation.classes] == probabilities.topk(2).indices.tolist()
    assert explanation.explained == explanation.classes[0]
    assert explanation.explained.name == f"class {probabilities.argmax()}"
    torch.testing.assert_close(explanation.explained.score, probabilities.max().item())
    torch.testing.assert_close(explanation.heatmap, anyhead(image)[0])
    assert (explanation.method, explanation.model) == ("AnyHead", target.name)
    title = f"{explanation.explained.name} {probabilities.max():.2f}"
    assert explanation.title == title


@pytest.mark.parametrize("method", ["AnyHead", "TVE", {"RISE": {"masks": 20}}])
def test_another_class_is_explained_as_if_it_had_been_asked_for(target, anyhead, passes, method):
    learned = {"AnyHead": lambda: anyhead, "TVE": lambda: TVE(target, target.grid, LIGHT).eval()}
    explainer = learned[method]() if method in ("AnyHead", "TVE") else method
    explanations = explainers.explain([PIXELS, PIXELS[::-1].copy()], target, method=explainer)
    asked = explainers.explain([PIXELS, PIXELS[::-1].copy()], target, method=explainer, classes=["class 3", 3])
    passes.clear()
    others = [explanation.of("class 3") for explanation in explanations]
    assert sum(passes) == (2 * 20 if isinstance(method, dict) else 2)  # a pass of this image alone
    for other, expected in zip(others, asked, strict=True):
        torch.testing.assert_close(other.heatmap, expected.heatmap)
        assert other.explained == expected.explained and other.classes == expected.classes
    torch.testing.assert_close(explanations[0].of(3).of(explanations[0].index).heatmap, explanations[0].heatmap)
    alone = explainers.explain(PIXELS, target, method=explainer)
    passes.clear()
    torch.testing.assert_close(alone.of("class 3").heatmap, asked[0].heatmap)
    assert isinstance(explainer, PreparedExplainer) is (not passes)  # all classes need one pass


@pytest.mark.parametrize(("resize", "size"), [("center", (50, 30)), ("border", (9, 30)), ("squash", (2, 60))])
def test_heatmaps_at_the_pixels_of_the_photo(target, resize, size):
    session = Session(target, "Chance")
    session.transform = replace(session.transform, resize=resize)
    (found,) = session.explain(Image.new("RGB", size))
    left, top, right, bottom = found.box
    at_pixels = found.at_pixels()
    assert at_pixels.shape == size[::-1] and at_pixels.dtype == torch.float32
    for y in range(size[1]):
        for x in range(size[0]):
            row, column = (y + 0.5 - top) / (bottom - top) * 4, (x + 0.5 - left) / (right - left) * 4
            inside = 0 <= row < 4 and 0 <= column < 4
            expected = found.heatmap[int(row), int(column)].item() if inside else math.nan
            assert at_pixels[y, x].item() == pytest.approx(expected, nan_ok=True)
    restored = pickle.loads(pickle.dumps(found)).at_pixels()
    assert torch.equal(restored, found.heatmap.repeat_interleave(8, 0).repeat_interleave(8, 1))


def test_explanations_of_a_folder_keep_one_image_each_and_nothing_of_their_batch(target, anyhead, tmp_path):
    """What each of 20 explanations keeps: pixels, scores and a heatmap, none of them a view of a batch."""
    for number in range(20):
        Image.fromarray(PIXELS[:20, :20] + number).save(tmp_path / f"{number}.png")
    session = Session(target, anyhead, batch_size=8)
    session.explain(tmp_path / "0.png")
    gc.collect()
    before = {id(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)}
    explanations = session.explain(tmp_path)
    gc.collect()
    kept = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and id(each) not in before]
    assert len(explanations) == 20 and len(kept) == 3 * 20
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in kept)
    assert {tuple(each.shape) for each in kept} == {(3, 32, 32), (5,), (4, 4)}


def test_the_model_and_the_image_stay_as_they_are(target, anyhead):
    model, image = timm_model().train(), IMAGE.copy()
    before = state(model)
    ship(anyhead, catalogue.SHIPPED / "vit.tag" / "anyhead")
    target.train().requires_grad_(True)
    loaded = explainers.load(catalogue.SHIPPED / "vit.tag" / "anyhead", target=target)
    assert not loaded.target.training and torch.equal(loaded(SQUARE), anyhead(SQUARE))
    for each in (model, target):
        explainers.explain(image, each, method="GAE")
        assert each.training and all(weight.requires_grad for weight in each.parameters())
    assert equal(state(model), before) and image == IMAGE


@pytest.mark.parametrize(("model", "label"), [("test_vit", "DecompX-SkipPLUS"), (None, "Occlusion(cells=7)")])
def test_auto_takes_what_the_model_has_and_says_so_once(model, label, capsys):
    target = planted(0, 0) if model is None else timm_model(model, as_target=True)
    made = [Session(target) for _ in range(2)]
    assert [each.method for each in made] == [label, label]
    (line,) = capsys.readouterr().err.splitlines()
    assert label in line and "no trained explainer is shipped" in line


def ship(anyhead, folder):
    """Put an explainer where shipped ones are."""
    anyhead.export(folder)
    (folder / "measured.json").write_text("{}")


def test_auto_takes_a_trained_explainer_that_is_shipped_for_the_backbone(target, anyhead, capsys):
    folder = catalogue.SHIPPED / "vit.tag" / "anyhead"
    ship(anyhead, folder)
    for method in ("auto", "anyhead", "AnyHead", str(folder), folder):
        explanation = explainers.explain(IMAGE, target, method=method)
        assert explanation.method == "AnyHead"
        torch.testing.assert_close(explanation.heatmap, anyhead(explanation.image[None])[0])
    assert not capsys.readouterr().err
    with pytest.raises(InputError, match=r"anyhead is shipped \(vit.tag\), got .* with other weights"):
        Session(timm_model(as_target=True, seed=3), "anyhead")


def test_auto_says_why_a_shipped_explainer_does_not_do(target, anyhead, monkeypatch, capsys):
    ship(anyhead, catalogue.SHIPPED / "vit.tag" / "anyhead")
    target.head = nn.Sequential(target.head, nn.Tanh())
    assert Session(target).method == "AnyHead"
    monkeypatch.setattr(choosing, "_load", Mock(side_effect=InputError("it is cut short")))
    assert Session(target).method != "AnyHead"
    assert "the shipped anyhead does not explain it (it is cut short" in capsys.readouterr().err


def test_files_that_cannot_be_read_are_left_out_of_a_folder_and_named(target, tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "LARGEST_BATCH", 2)
    for name in "abd":
        Image.fromarray(PIXELS + ord(name)).save(tmp_path / f"{name}.png")
    (tmp_path / "c.png").write_bytes(b"broken")
    np.save(tmp_path / "e.npy", PIXELS / 255)
    line = r"left out: 2 files \(c.png, e.npy\) that cannot be decoded, of 5 images"
    with pytest.warns(UserWarning, match=line):
        explanations = explainers.explain(tmp_path, target, method="Chance", classes=[0, 1, 2, 3, 4])
    assert [(each.name, each.index) for each in explanations] == [("a.png", 0), ("b.png", 1), ("d.png", 3)]
    for use in (
        lambda: explainers.evaluate(target, ["Chance"], tmp_path, levels=3),
        lambda: explainers.compare(tmp_path, PIXELS, target, method="DirectPaths"),
        lambda: explainers.nearest(PIXELS, tmp_path, target, method="DirectPaths"),
    ):
        with pytest.warns(UserWarning, match=line):
            use()
    for name in "abcd":
        (tmp_path / f"{name}.png").unlink()
    with pytest.raises(InputError, match=r"e.npy.* white=1"):
        explainers.explain(tmp_path, target, method="Chance")


@pytest.mark.situation(35)
def test_large_images_are_explained_one_by_one_by_methods_that_keep_attention_maps():
    with torch.device("meta"):  # in shapes alone
        large, small = (
            TargetModel(timm.create_model("vit_tiny_patch16_224", **TINY_VIT | {"img_size": size, "patch_size": 7}))
            for size in (518, 28)
        )
    for target, method, expected in ((large, "GAE", 1), (large, "DecompX-PLUS", 16), (small, "GAE", 16)):
        assert choose_batch_size(posthoc.build(method, target, target.grid), target) == expected


@pytest.mark.situation(12)
@pytest.mark.parametrize(("image_size", "shape"), [(48, (6, 6)), ((24, 40), (3, 5))])
def test_more_pixels_give_more_patches_of_the_same_photo(image_size, shape):
    model = timm_model()
    before = state(model)
    target = as_target(model, image_size=image_size)
    found = explainers.explain(IMAGE, target, method="GAE", classes=1)
    assert found.heatmap.shape == shape and found.image.shape[1:] == tuple(8 * side for side in shape)
    assert equal(state(model), before)
    expected = posthoc.build("GAE", target, target.grid)(found.image[None], torch.tensor([1]))[0]
    torch.testing.assert_close(found.heatmap, expected)


def test_a_function_explains_as_many_images_at_once_as_it_is_told(target):
    sizes = []

    def constant(images, classes):
        sizes.append(len(images))
        return classes[:, None, None].float().expand(-1, 4, 4)

    stream = Session(target, constant, batch_size=2).stream(np.stack([PIXELS] * 5), classes=2)
    first = next(stream)
    assert first.method == "constant" and (first.heatmap == 2).all() and sizes == [2]
    assert len(list(stream)) == 4 and sizes == [2, 2, 1]
    with pytest.raises(InputError, match="^expected batch_size above 0, got batch_size=0"):
        Session(target, constant, batch_size=0)


def test_pictures_are_drawn_shown_in_notebooks_and_saved_whole_but_never_over_the_image(target, tmp_path):
    photo = tmp_path / "cat.png"
    IMAGE.save(photo)
    explanation = explainers.explain(photo, target, method="Chance", top=3)
    explained = explanation.explained
    words = explanation.title, explained.name, "Chance"
    expected = draw_annotated(IMAGE, explanation.heatmap, *words, explanation.box, size=200, signed=False)
    assert np.array_equal(explanation.picture(size=200), expected)
    path = explanation.save(tmp_path / "new" / "a.png", size=200)
    assert np.array_equal(Image.open(path), expected) and [file.name for file in path.parent.iterdir()] == ["a.png"]
    assert explanation.save(tmp_path, size=200).name == f"cat_Chance_class_{explained.index}.png"
    text = explanation._repr_html_()
    assert text.count("<tr>") == 4 and 'src="data:image/png;base64,' in text
    before = photo.read_bytes()
    for name, told in (("a.txt", r"\.png.*, got a.txt"), ("cat.png", "another file than the image itself")):
        with pytest.raises(InputError, match=told):
            explanation.of(1).save(tmp_path / "." / name)
    assert photo.read_bytes() == before


@pytest.mark.situation(33)
@pytest.mark.parametrize(
    "classes", [[np.int64(1), torch.tensor(2)], ["class 1", np.uint8(2)], torch.tensor([1, 2]), range(1, 3)]
)
def test_classes_are_named_as_they_come_out_of_a_loader(target, classes):
    pictures = np.zeros((2, 32, 32, 3), dtype=np.uint8)
    found = Session(target, "Chance").explain(pictures, classes)
    assert [each.index for each in found] == [1, 2] and found[0].of(np.int64(2)).index == 2


@pytest.mark.situation(33)
@pytest.mark.parametrize("wrong", [-1, np.int64(-1), torch.tensor(5), True, torch.tensor([1, 2]), 1.0])
def test_what_is_no_class_is_refused(target, wrong):
    with pytest.raises(InputError, match="^classes=.*: expected (0 to 4|names or indices)"):
        find_image_classes([wrong], target.num_classes * ["class"], 1)


def test_the_session_knows_the_names_of_the_classes(target):
    target.classes = ["n02123045", "polar_bear", "n02012849", "n03126707", "dog"]
    own = Session(target, "Chance")
    assert own.names == class_names(target) and own.names[:2] == ["tabby", "polar bear"]
    assert [own.class_index(each) for each in ("Tabby", "polar_bear", "polar bear", 3)] == [0, 1, 1, 3]
    with pytest.raises(InputError, match="classes=crane: expected one of the model's 5 classes: did you mean crane: "):
        own.class_index("crane")


@pytest.mark.parametrize("broken", ["weights", "method"])
def test_a_number_that_is_not_finite_is_refused_with_the_name_of_the_image(target, broken):
    if broken == "weights":
        target.head.bias.data[2] = torch.nan
    said = {"weights": "finite logits of vit_tiny_patch16_224 for image 0", "method": "finite heatmap of image 1"}

    def explainer(images, classes):
        heatmaps = torch.rand(len(images), 4, 4)
        heatmaps[1, 2, 2] = torch.nan
        return heatmaps

    with pytest.raises(InputError, match=said[broken]):
        explainers.explain([PIXELS, PIXELS], target, method=explainer)
    if broken == "weights":
        target.backbone.norm.bias.data[:] = torch.nan
        for route in (
            lambda: explainers.compare(PIXELS, PIXELS, target, method="DirectPaths"),
            lambda: explainers.nearest(PIXELS, [PIXELS], target, method="DirectPaths"),
        ):
            with pytest.raises(InputError, match="finite .* for image 0"):
                route()


@pytest.mark.situation(14)
def test_a_regression_has_a_value_and_a_map_of_what_raises_and_lowers_it(capsys):
    model = timm_model(num_classes=1)
    with torch.no_grad():
        model.head.bias.fill_(37.5)
        value = model((SQUARE / 255 - 0.5) / 0.5).item()
    found = explainers.explain(IMAGE, as_target(model, score="value"), method="InputXGradient")
    assert found.title == f"value {value:.4g}" and found.title.startswith("value 3") and found.quantity == "value"
    assert [each.score for each in found.classes] == pytest.approx([value], abs=1e-3)
    assert (found.heatmap > 0).any() and (found.heatmap < 0).any() and found.signed
    assert "probability" not in found._repr_html_()


@pytest.mark.situation(13)
def test_each_true_class_of_several_is_explained():
    model = timm_model(num_classes=3)
    with torch.no_grad():
        model.head.weight.mul_(0.05)
        model.head.bias.copy_(torch.tensor([6.0, 6.5, -6.0]))
        expected = model((SQUARE / 255 - 0.5) / 0.5)[0].sigmoid()
    found = explainers.explain(IMAGE, as_target(model, score="sigmoid"), method="Occlusion")
    torch.testing.assert_close(found.scores, expected, rtol=1e-3, atol=1e-4)
    likely = [each.index for each in found.classes if each.score > 0.5]
    assert likely == [1, 0] and not torch.equal(found.heatmap, found.of(0).heatmap)


@pytest.mark.situation(39)
def test_a_constant_heatmap_is_said(target):
    def explainer(images, classes):
        return (classes == 3)[:, None, None] * torch.rand(len(images), 4, 4)

    with pytest.warns(UserWarning, match="^explainer gives every patch of image 0, image 1 the same score"):
        constant, _ = explainers.explain([PIXELS, PIXELS], target, method=explainer, classes=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        constant.of(3)
    with pytest.warns(UserWarning, match="^explainer gives every patch of image 0 the same score"):
        constant.of(2)


@pytest.mark.parametrize("others", [[4], [4, 2]])
def test_a_class_is_told_apart_from_others_by_the_difference_of_their_rows(target, anyhead, passes, others):
    best, second = explainers.explain(IMAGE, target, method=anyhead).classes[:2]
    assert explainers.explain(IMAGE, target, method=anyhead, against=best.name).explained == second
    weight, (vectors, _) = target.head.weight.double(), anyhead.decompose(SQUARE)
    passes.clear()
    found = explainers.explain(IMAGE, target, method=anyhead, classes=1, against=others)
    expected = torch.zeros(found.heatmap.shape, dtype=torch.float64)
    for patch, vector in enumerate(vectors[0].double()):
        against = sum(weight[other] @ vector for other in others) / len(others)
        expected[divmod(patch, expected.shape[1])] = weight[1] @ vector - against
    torch.testing.assert_close(found.heatmap.double(), expected, rtol=1e-4, atol=1e-5)
    counted = len(passes)
    other_way = found.of(others[0], against=1)
    assert len(passes) == counted and len(found.of(0).against) == len(others)
    if len(others) == 1:
        torch.testing.assert_close(other_way.heatmap, -found.heatmap)
        assert found.title.endswith(f" rather than {found.names[others[0]]}")


def test_masks_explain_the_difference_of_two_scores(target, passes):
    method = posthoc.build("Occlusion", target, target.grid)
    found = explainers.explain(IMAGE, target, method=method, classes=1, against=4).heatmap
    assert sum(passes) - 1 == choosing.estimate_passes(method, [4]) == 2 * choosing.estimate_passes(method)
    normalised, grid = target.normalise(SQUARE), target.grid
    whole = target.score_images(normalised)[0]
    for patch in (0, grid.num_patches - 1):
        keep = torch.ones(1, grid.num_patches, dtype=torch.bool)
        keep[0, patch] = False
        hidden = target.score_images(mask_pixels(normalised, keep, grid))[0]
        torch.testing.assert_close(found.flatten()[patch], (whole[1] - whole[4]) - (hidden[1] - hidden[4]))
