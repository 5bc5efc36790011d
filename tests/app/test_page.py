"""What the page of `explainers serve` computes, and that it keeps visitors apart."""

import base64
import io
import re

import numpy as np
import pytest
import references
import torch
from clips import random_directions
from conftest import timm_model
from PIL import Image

from explainers.app.page import build_app, images
from explainers.app.page.api import Api
from explainers.app.page.images import CHANCE, DRAWS, LEVELS, PICTURE_SIZE, Index, OpenedImage
from explainers.app.page.views import VIEWS, describe_image, draw_curves, encode_colours
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.likeness import likeness
from explainers.masking import level_sizes
from explainers.posthoc import build
from explainers.report.overlays import colour_scale, ends, fade, legend_colours, overlay
from explainers.text import TextExplainer, TextHead


def photo(seed=0, size=(80, 60)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def show(session, seed=0, explainers=None):
    return OpenedImage(session, photo(seed), f"{seed}.png", explainers or {})


@pytest.fixture
def session(target):
    return Session(target, "Occlusion")


@pytest.fixture
def shown(session):
    return show(session, explainers={"GAE": build("GAE", session.target, session.target.grid)})


@torch.no_grad()
def slowly(shown, hidden, index):
    """The probability of a class, from pixels that are hidden one patch at a time."""
    image = shown.target.normalise(shown.image)
    for patch in hidden:
        image[0][references.window(patch, 4, 8)] = 0
    return shown.target.classify(shown.target.embed(image)).softmax(-1)[0, index].item()


def test_probabilities_are_those_of_masked_images(shown):
    masks = [[], [3], [0, 7, 15], list(range(16))]
    expected = [slowly(shown, hidden, 2) for hidden in masks]
    assert shown.scores(Index(2), masks) == pytest.approx(expected, abs=1e-5)
    assert expected[0] == pytest.approx(shown.probabilities[2].item(), abs=1e-5)


@pytest.mark.parametrize("side", ["most", "least"])
def test_curves_hide_the_patches_in_their_order(shown, side):
    order = shown.orders("Occlusion", Index(1))[0].tolist()
    sizes = level_sizes(16, LEVELS).tolist()
    hidden = [order[:size] if side == "most" else order[size:] for size in sizes]
    expected = [slowly(shown, patches, 1) for patches in hidden]
    expected = expected if side == "most" else expected[::-1]
    assert shown.curve("Occlusion", Index(1), side) == pytest.approx(expected, abs=1e-5)


def test_chance_is_the_mean_of_random_orders(shown):
    orders = shown.orders(CHANCE, Index(0)).tolist()
    assert len({tuple(order) for order in orders}) == DRAWS and all(
        sorted(order) == list(range(16)) for order in orders
    )
    half = level_sizes(16, LEVELS)[5]
    expected = sum(slowly(shown, order[:half], 1) for order in orders) / DRAWS
    assert shown.curve(CHANCE, Index(1))[5] == pytest.approx(expected, abs=1e-5)


def test_an_opened_image_has_all_that_the_browser_draws(shown):
    found = describe_image(shown)
    pictures = [Image.open(io.BytesIO(base64.b64decode(found[name].split(",")[1]))) for name in ("picture", "pale")]
    size = PICTURE_SIZE * 60 // 80, PICTURE_SIZE  # of the whole photo
    assert [(each.format, each.size, each.mode) for each in pictures] == [("JPEG", size, "RGB")] * 2
    assert found["box"] == pytest.approx([8 * each for each in shown.session.transform.box(60, 80)])
    for each, pale in zip(pictures, (0, 0.5), strict=True):
        expected = fade(torch.from_numpy(np.array(shown.picture)).permute(2, 0, 1), found["box"], pale)
        assert np.abs(np.array(each) - expected.permute(1, 2, 0).numpy().astype(float)).mean() < 8
    most = shown.probabilities.topk(5)
    assert [[index, value] for index, _, value in found["classes"]] == [
        [index, pytest.approx(value)] for index, value in zip(most.indices.tolist(), most.values.tolist(), strict=True)
    ]
    assert (found["rows"], found["columns"]) == (4, 4) and re.fullmatch(r"rgb\(\d+, \d+, \d+\)", found["hiding"])


def tile_of(tile):
    """The pixels (4, H, W) of the base64 of RGBA bytes, and a width."""
    return torch.tensor(list(base64.b64decode(tile[0]))).unflatten(0, (-1, tile[1], 4)).permute(2, 0, 1).float()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("kind", "finer"), [("patches", 1), ("smooth", 128 // 5)])
def test_colours_over_the_pale_image_are_the_overlay(signed, kind, finer):
    image = torch.randint(256, (3, 4 * finer, 5 * finer), dtype=torch.uint8)
    heatmap = torch.randn(4, 5)
    *colours, opacity = tile_of(encode_colours(heatmap, colour_scale(heatmap, signed))[kind])
    blended = fade(image) + opacity / 255 * (torch.stack(colours) - fade(image))
    assert (blended - overlay(image, heatmap, smooth=kind == "smooth", signed=signed)).abs().max() <= 1.5


def test_heatmaps_of_every_class_and_method(shown):
    for method in ("Occlusion", "GAE"):
        reply = VIEWS["heatmap"](shown, method, 3)
        assert sorted(reply["order"]) == list(range(16)) and tile_of(reply["tiles"]["patches"]).shape == (4, 4, 4)
        assert reply["class"] == [3, "class 3", shown.probabilities[3].item()]
        signed = method == "Occlusion"
        assert reply["legend"]["words"] == ends(signed, "class 3")
        assert reply["legend"]["colours"] == legend_colours(signed, 9)


def test_labels_of_curves_are_text_and_scores_below_0_stay_in_the_figure():
    svg = draw_curves({"<b>": [0.1, -0.3], CHANCE: [0.1, 0.0]})
    assert "<b>" not in svg
    heights = [float(point.split(",")[1]) for line in re.findall('points="([^"]*)"', svg) for point in line.split()]
    assert min(heights) == 8 and max(heights) == 8 + 148 and 'data-lowest="-0.3"' in svg


@pytest.fixture
def prompted(target):
    """An image of a classifier with a text head."""
    session = Session(target, "GAE", text_head=TextHead(random_directions))
    return show(session, explainers={"DirectPaths": build("DirectPaths", target, target.grid)})


@torch.no_grad()
def test_texts_are_explained_and_tested_like_classes(prompted):
    assert describe_image(prompted)["prompts"] and describe_image(prompted)["classes"]
    head = prompted.session.text_head
    whole = head(prompted.target.embed(prompted.target.normalise(prompted.image)), ["a cat", "a dog"])[0].tolist()
    assert VIEWS["prompts"](prompted, ["a cat", "a dog"])["classes"] == [
        ["a cat", "a cat", pytest.approx(whole[0], abs=1e-5)],
        ["a dog", "a dog", pytest.approx(whole[1], abs=1e-5)],
    ]
    for method in ("GAE", "DirectPaths"):
        built = build(method, prompted.target, prompted.grid)
        expected = TextExplainer(built, head, "a cat")(prompted.image, torch.tensor([0]))[0]
        torch.testing.assert_close(prompted.heatmap(method, Index("a cat")), expected, rtol=1e-3, atol=1e-5)
    reply = VIEWS["heatmap"](prompted, "GAE", "a cat")
    assert reply["class"] == ["a cat", "a cat", pytest.approx(whole[0], abs=1e-5)]
    hidden = prompted.target.normalise(prompted.image).clone()
    hidden[0][references.window(3, 4, 8)] = 0
    expected = head(prompted.target.embed(hidden), ["a cat"]).item()
    assert prompted.scores(Index("a cat"), [[], [3]]) == pytest.approx([whole[0], expected], abs=1e-5)
    curve = prompted.curve("GAE", Index("a cat"))
    assert curve[0] == pytest.approx(whole[0], abs=1e-5)
    order = prompted.orders("GAE", Index("a cat"))[0].tolist()
    half = order[: level_sizes(16, LEVELS)[5]]
    assert curve[5] == pytest.approx(prompted.scores(Index("a cat"), [half])[0], abs=1e-5)
    assert VIEWS["picture"](prompted, ["GAE"], "a cat", False)["file"].endswith("a_cat.png")


def test_texts_are_told_apart_from_the_others(prompted):
    built = build("GAE", prompted.target, prompted.grid)
    others = ["a dog", "a bird"]
    slow = TextExplainer(built, prompted.session.text_head, "a cat", others)
    expected = slow(prompted.image, torch.tensor([0]))[0]
    torch.testing.assert_close(prompted.heatmap("GAE", Index("a cat", tuple(others))), expected, rtol=1e-3, atol=1e-5)
    tiles = VIEWS["heatmap"](prompted, "GAE", "a cat", others)["tiles"]
    assert tiles == encode_colours(expected, colour_scale(expected, signed=False))
    assert (
        VIEWS["curves"](prompted, ["GAE"], "a cat", "most", others)["values"]
        != VIEWS["curves"](prompted, ["GAE"], "a cat", "most")["values"]
    )
    for against, message in (
        ([" "], "^expected texts that are not empty"),
        (["b"] * 51, "^expected against from 0 to 50"),
        (["b" * 301], "^expected texts of at most 300 characters, got 301"),
    ):
        with pytest.raises(InputError, match=message):
            VIEWS["heatmap"](prompted, "GAE", "a cat", against)


@pytest.mark.parametrize(("method", "others"), [("Occlusion", [3]), ("GAE", [3, 4])])
def test_classes_are_told_apart_from_others(shown, session, method, others):
    answer = Session(session.target, method).explain(photo(), 1, against=others)[0]
    torch.testing.assert_close(shown.heatmap(method, Index(1, tuple(others))), answer.heatmap, rtol=1e-3, atol=1e-5)
    reply = VIEWS["heatmap"](shown, method, 1, others)
    one = "class 3" if len(others) == 1 else ""
    assert reply["legend"]["words"] == ends(method == "Occlusion", "class 1", one)
    assert reply["class"] == [1, "class 1", pytest.approx(answer.scores[1].item(), abs=1e-5)]
    hidden = [[], [0, 7]]
    expected = [
        slowly(shown, each, 1) - sum(slowly(shown, each, other) for other in others) / len(others) for each in hidden
    ]
    scores = VIEWS["scores"](shown, 1, hidden, others)
    assert scores == {"values": pytest.approx(expected, abs=1e-5), "whole": pytest.approx(expected[0], abs=1e-5)}
    curve = VIEWS["curves"](shown, [method], 1, "most", others)
    assert curve["values"][method][0] == pytest.approx(expected[0], abs=1e-5)
    apart = "minus that of class 3" if one else "minus that of 2 others, on average,"
    assert curve["axis"] == f"The probability of class 1 {apart}"
    file = VIEWS["picture"](shown, [method], 1, True, others)["file"]
    assert file == f"0_{method}_class_1_rather_than_{'class_3' if one else '2_other_classes'}.png"


def test_a_model_of_bands_has_no_page():
    with pytest.warns(UserWarning, match="mean and std are guessed"):
        bands = Session(timm_model(as_target=True, in_chans=6), "Occlusion")
    with pytest.raises(InputError, match="^expected a model of photos, of 1 or 3 channels, got 6 of "):
        build_app(bands)


@torch.no_grad()
def test_two_images_have_heatmaps_and_pairs_of_patches(shown, session):
    other = show(session, 1)
    reply = VIEWS["alike"](shown, other)
    expected = likeness(build("DirectPaths", session.target, session.target.grid), shown.image, other.image)
    assert reply["method"] == "DirectPaths" and reply["similarity"] == pytest.approx(expected.similarity.item())
    steps = np.frombuffer(base64.b64decode(reply["pairs"]), dtype=np.int16).astype(float)
    np.testing.assert_allclose(steps.reshape(16, 16) * reply["scale"], expected.pairs[0], atol=reply["scale"])
    heatmaps = expected.of_first[0], expected.of_second[0]
    for tiles, heatmap in zip(reply["tiles"], heatmaps, strict=True):
        assert tiles == encode_colours(heatmap, colour_scale(heatmap, signed=True))
    assert reply["ties"][0] == list(divmod(int(expected.pairs.argmax()), 16))


def data_of(seed=0):
    file = io.BytesIO()
    photo(seed).save(file, "PNG")
    return {"name": f"{seed}.png", "data": base64.b64encode(file.getvalue()).decode()}


def test_visitors_are_apart_and_the_images_used_last_are_kept(session, monkeypatch):
    monkeypatch.setattr(images, "MOST_IMAGES", 2)
    api = Api(session, {})
    one, other = (api.open_image(**data_of(0))["key"] for _ in range(2))
    assert one != other and min(len(one), len(other)) >= 20
    assert "similarity" in api.ask("alike", one, other=other)
    third = api.open_image()
    assert third["name"] == "cat_and_coffee.jpg"  # the example, without a file
    for image, others in ((one, {}), ("", {}), (third["key"], {"other": "guess"})):
        with pytest.raises(InputError, match="forgotten: drop it again"):
            api.ask("alike", image, **{"other": other} | others)
    with pytest.raises(InputError, match="expected one of Occlusion, got os"):
        api.ask("heatmap", third["key"], index=0, method="os")
    with pytest.raises(InputError, match="^a{100}: expected an image, got "):
        api.open_image(name="a" * 200, data="!")


BAD = [
    ("heatmap", {"method": "GAE", "index": "a cat"}, "classes=a cat: expected one of the model's 5 classes: "),
    ("heatmap", {"method": "GAE", "index": 5}, "classes=5: expected 0 to 4, or names of classes"),
    ("curves", {"methods": ["GAE"], "index": 0, "side": "some"}, "expected side most or least, got some"),
    ("curves", {"methods": ["GAE"] * 5, "index": 0, "side": "most"}, "expected methods from 0 to 4, got methods=5"),
    ("heatmap", {"method": "GAE", "index": 1, "against": [1]}, "against='class 1': expected another class than the"),
    ("scores", {"index": 0, "hidden": [["1"]]}, "expected patches from 0 to 15, got ['1']"),
]


@pytest.mark.parametrize(("name", "question", "message"), BAD)
def test_bad_questions_are_answered_in_one_line(shown, name, question, message):
    with pytest.raises(InputError, match=re.escape(message)) as raised:
        VIEWS[name](shown, **question)
    assert "\n" not in str(raised.value)
