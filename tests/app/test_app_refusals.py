"""What a call of the library cannot use is refused in one line that names it."""

import struct
from zlib import crc32

import numpy as np
import pytest
import torch
from clips import random_directions as encode
from conftest import timm_model
from PIL import Image

import explainers
from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.text import TextHead

pytestmark = pytest.mark.usefixtures("nothing_shipped")
PIXELS = np.random.default_rng(1).integers(0, 256, (3, 40, 32, 3), dtype=np.uint8)
IMAGE = Image.fromarray(PIXELS[0])


def explain(target, **given):
    explainers.explain(**{"images": IMAGE, "model": target, "method": "Chance"} | given)


def explain_text(target, **given):
    explainers.explain(IMAGE, target, **{"text": "a cat", "text_head": TextHead(encode), "method": "GAE"} | given)


def compare(target, **given):
    explainers.compare(PIXELS[0], model=target, **{"other": PIXELS[1], "method": "DirectPaths"} | given)


def nearest(target, **given):
    explainers.nearest(model=target, **{"image": "alone/a.png", "folder": "photos", "method": "DirectPaths"} | given)


def edges(images, classes):
    return images.float().mean(1)[:, ::8, ::8]


def evaluate(target, **given):
    explainers.evaluate(target, **{"explainers": [edges], "images": PIXELS[:2], "levels": 3} | given)


def evaluate_value(target, **given):
    evaluate(TargetModel(timm_model(num_classes=1), score="value"), **given)


def bomb():
    """A PNG file that says that it has 20 000 × 20 000 pixels."""
    chunks = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0), b"IDAT"
    parts = [struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", crc32(chunk)) for chunk in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


FILES = {"broken.png": b"no image", "photo.HEIC": b"....ftypheic", "bomb.png": bomb()}
IMAGES = [
    ("https://example.org/cat.jpg", "URL"),
    ("", "''"),
    ("/9j/4AAQ" * 1000, "/9j/4AAQ"),
    ("photo.HEIC", "photo.HEIC"),  # as phones take them, which Pillow does not read
    ("empty", "empty"),
    ("broken.png", "broken.png"),
    pytest.param("bomb.png", "bomb.png", marks=pytest.mark.situation(25)),
    (PIXELS[0] / 255, "white=1"),
    (np.zeros((5, 8, 7), np.uint8), "[5, 8, 7]"),
    (np.ones((), np.uint8), "[]"),
    (torch.zeros(8, 8).to_sparse(), "sparse_coo"),
    ([], "empty list"),
    ([None], "NoneType"),
    (Image.fromarray(PIXELS[0, ..., 0] / np.float32(255)), "mode F"),
]
REFUSED = [
    (explain, {"classes": "class 9"}, "classes=class 9"),
    (explain, {"classes": [0, 1]}, "classes"),
    (explain, {"top": 0}, "top=0"),
    *((explain, {"method": each}, str(each)) for each in ("GAEE", "runs/gone", "tve", 3)),
    (explain, {"method": {"RISE": {"masks": [3, 4]}}}, "one method"),
    (explain, {"method": lambda images, classes: images}, "heatmaps"),
    (explain, {"model": "vit_tinny"}, "vit_tinny"),
    (explain, {"classes": 1, "against": 1}, "against="),
    (explain, {"against": [0, 1, 2, 3, 4]}, "against="),
    (explain, {"classes": 1, "against": "no such"}, "against=no such"),
    (explain_text, {"text": ""}, "texts"),
    (explain_text, {"against": "a cat"}, "against="),
    (explain_text, {"text": None, "against": "a dog", "text_head": None}, "against=a dog"),
    (explain_text, {"classes": 1}, "classes="),
    (explain_text, {"method": "RISE"}, "RISE"),
    (explain_text, {"text_head": None}, "vit_tiny_patch16_224"),
    (explain_text, {"text_head": encode}, "text_head"),
    (compare, {"other": PIXELS}, "other"),
    (compare, {"method": "RISE"}, "RISE"),
    (nearest, {"k": 0}, "k=0"),
    (nearest, {"folder": "alone"}, "a.png"),  # the image itself
    (evaluate, {"explainers": "GAE"}, "explainers="),
    (evaluate, {"explainers": [edges, edges]}, "explainers="),
    (evaluate, {"explainers": [lambda images, classes: images]}, "<lambda>"),
    (evaluate, {"explainers": [lambda images, classes: None]}, "<lambda>"),
    (evaluate, {"explainers": {"saved": np.zeros((3, 4, 4))}}, "explainers="),  # of two images
    (evaluate, {"explainers": {"saved": [np.zeros((4, 4)), np.zeros((3, 3))]}}, "explainers="),
    (evaluate, {"explainers": {"saved": np.zeros((2, 7, 7))}}, "saved"),
    (evaluate, {"classes": [1]}, "classes"),
    (evaluate, {"removal": "blur"}, "removal"),
    (evaluate_value, {"curves": ["log_odds"]}, "curves=log_odds"),
]


def assert_refused(call, target, given, named):
    with pytest.raises(InputError) as refused:
        call(target, **given)
    assert named in str(refused.value) and "\n" not in str(refused.value)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The folder in which paths are looked up."""
    for name in ("alone/a.png", "photos/b.png"):
        (tmp_path / name).parent.mkdir()
        IMAGE.save(tmp_path / name)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("explainers.app.photos.endings", lambda: {".png"})  # whether or not pillow-heif is installed


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("call", "given", "named"), REFUSED)
def test_bad_input_is_refused(call, given, named, target):
    assert_refused(call, target, given, named)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("images", "named"), IMAGES)
def test_what_is_no_image_is_refused(images, named, target):
    assert_refused(explain, target, {"images": images}, named)


def test_an_explainer_of_another_model_is_refused(anyhead):
    assert_refused(explain, timm_model(as_target=True, seed=5), {"method": anyhead}, "other weights")


def test_further_texts_are_checked_too(target):
    explanation = explainers.explain(IMAGE, target, method="GAE", text="a cat", text_head=TextHead(encode))
    for wrong, named in ((" ", "texts"), (1, "classes=1")):
        assert_refused(lambda _, wrong=wrong: explanation.of(wrong), target, {}, named)
