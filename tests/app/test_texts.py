"""One call explains any text with any model that has a text head."""

import numpy as np
import pytest
import torch
from clips import clip, image_tower
from clips import random_directions as encode
from PIL import Image

import explainers
from explainers import posthoc
from explainers.app import choosing
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.text import TextExplainer, TextHead, clip_text_head

pytestmark = pytest.mark.usefixtures("nothing_shipped")
PIXELS = np.random.default_rng(1).integers(0, 256, (3, 40, 32, 3), dtype=np.uint8)
IMAGE = Image.fromarray(PIXELS[0])


@pytest.fixture
def head():
    return TextHead(encode)


@pytest.fixture
def passes(monkeypatch):
    """Counts the batches that any target embeds."""
    counted = []
    pool = TargetModel.pool
    monkeypatch.setattr(TargetModel, "pool", lambda self, x: counted.append(len(x)) or pool(self, x))
    return counted


@torch.no_grad()
@pytest.mark.parametrize(
    ("method", "against"), [("AnyHead", ["a cat", "a bird"]), ("GAE", "a bird"), ("DirectPaths", None)]
)
def test_the_best_text_is_explained_and_all_are_listed(target, head, anyhead, method, against):
    explainer = anyhead if method == "AnyHead" else method
    own = ["a cat", "a dog", "grass"]
    explanations = explainers.explain(PIXELS, target, method=explainer, text=own, against=against, text_head=head)
    built = anyhead if method == "AnyHead" else posthoc.build(method, target, target.grid)
    slow = TextExplainer(built, head, own, against)
    images = torch.stack([explanation.image for explanation in explanations])
    scores = slow.scores(images)
    for row, explanation in enumerate(explanations):
        order = scores[row].argsort(descending=True).tolist()
        assert [each.index for each in explanation.classes] == order and explanation.explained.index == order[0]
        assert explanation.quantity == "similarity"
        torch.testing.assert_close(explanation.scores, scores[row])
        for text in range(3):
            expected = slow(images[row : row + 1], torch.tensor([text]))[0]
            torch.testing.assert_close(explanation.of(own[text]).heatmap, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["AnyHead", "GAE"])
def test_any_further_text_takes_a_pass_unless_the_explainer_has_vectors(target, head, anyhead, passes, method):
    explainer = anyhead if method == "AnyHead" else method
    explanation = explainers.explain(IMAGE, target, method=explainer, text="a cat", text_head=head)
    expected = explainers.explain(IMAGE, target, method=explainer, text=["a cat", "a dog"], text_head=head)
    passes.clear()
    other = explanation.of("a dog")
    assert len(passes) == (method == "GAE")
    torch.testing.assert_close(other.heatmap, expected.of("a dog").heatmap)
    assert [each.name for each in other.classes] == [each.name for each in expected.classes]
    assert [each.name for each in explanation.classes] == ["a cat"] and other.of(0).explained.name == "a cat"


@pytest.mark.slow
def test_a_clip_of_timm_with_its_text_tower(monkeypatch):
    clip()
    tower = image_tower()
    head = clip_text_head(tower, "tiny-quickgelu", "")
    monkeypatch.setattr(choosing, "clip_text_head", lambda target: head)
    explanation = explainers.explain(IMAGE, tower, text=["a cat", "a dog"])
    with torch.no_grad():
        expected = head(tower.embed(tower.normalise(explanation.image[None])), ["a cat", "a dog"])
    torch.testing.assert_close(explanation.scores, expected[0])
    assert explanation.method == "DirectPaths" and explanation.heatmap.shape == (4, 4)
    assert explanation.title.startswith(explanation.explained.name) and "similarity" in explanation._repr_html_()


def test_the_head_of_the_caller_stays_where_it_was(target, head):
    own = Session(target, "GAE", text_head=head)
    assert own.text_head is head
    with pytest.raises(InputError, match="^expected embeddings of width 8, for which this text head was made, got 24"):
        Session(target, "GAE", text_head=TextHead(encode, torch.randn(24, 8)))
