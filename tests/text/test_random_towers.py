"""Small towers of CLIP, SigLIP, TinyCLIP and DINOv2: one text or many, one image or several, with any explainer."""

from functools import partial

import pytest
import torch
from clips import GELU, OPENAI, image_tower, random_directions

from explainers.anyhead import AnyHead, AnyHeadNetwork
from explainers.posthoc import build
from explainers.text import TextExplainer, clip_text_head
from explainers.transformer.direct_paths import default_direct

SIGLIP = "vit_base_patch16_siglip_224.v2_webli"
TINYCLIP = "vit_xsmall_patch16_clip_224.tinyclip_yfcc15m"
DINOV2 = "vit_small_patch14_dinov2.lvd142m"
TOWERS = {OPENAI: {}, GELU: {}, TINYCLIP: {}, SIGLIP: {"num_classes": None}, DINOV2: {"num_classes": None}}
WITH_TEXTS = [name for name in TOWERS if name != DINOV2]
METHODS = ["AnyHead", "DecompX-SkipPLUS", "AttnLRP", "IntegratedGradients"]
IMAGES = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
MANY = [f"text {number}" for number in range(60)]


def tower(name):
    return image_tower(name, **TOWERS[name])


def head_of(target):
    width = getattr(target.head, "out_features", target.embed_dim)
    return clip_text_head(target, encode=partial(random_directions, width=width))


def explainer_of(method, target):
    if method != "AnyHead":
        return build(method, target, target.grid)
    network = partial(AnyHeadNetwork, blocks=[0, 1], width=12, direct=default_direct(target), paths="flow")
    return AnyHead(target, target.grid, network, temperature=2.0, blend=0.5).eval()


@pytest.mark.parametrize(
    ("name", "method"), [*((OPENAI, method) for method in METHODS), *((name, "AnyHead") for name in WITH_TEXTS[1:])]
)
def test_many_texts_of_several_images_are_those_of_each_text_and_image_alone(name, method):
    target = tower(name)
    head, explainer = head_of(target), explainer_of(method, target)
    texts = MANY[:3] if method == "IntegratedGradients" else MANY  # a pass for each text
    against = MANY[1:3] if method == "DecompX-SkipPLUS" else None
    every = TextExplainer(explainer, head, texts, against)
    together = every.explain_all(IMAGES)
    assert every.scores(IMAGES).shape == (3, len(texts))
    assert together.shape == (3, len(texts), 4, 4) and together.isfinite().all() and together.std() > 0
    size = together.abs().max().item()
    for number in (0, len(texts) - 1):
        alone = TextExplainer(explainer, head, texts[number], against)
        for found in (alone(IMAGES[1:2], torch.tensor([0])), every(IMAGES[1:2], torch.tensor([number]))):
            torch.testing.assert_close(found[0], together[1, number], rtol=1e-3, atol=1e-4 * size)


@pytest.mark.parametrize("method", METHODS)
def test_a_tower_without_texts_explains_likeness_and_one_or_many_functionals(method):
    explainer = explainer_of(method, tower(DINOV2))
    likeness = explainer.explain(IMAGES, lambda embeddings: embeddings.detach().expand(3, 3, -1))
    with torch.no_grad():
        embeddings = explainer.target.embed(explainer.target.normalise(IMAGES))
    given = explainer.explain(IMAGES, embeddings.roll(1, 0))
    expected = torch.stack([likeness[i, (i - 1) % 3] for i in range(3)])
    torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
