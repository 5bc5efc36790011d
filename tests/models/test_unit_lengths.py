"""Modules that divide by lengths: heads of cosines are explained as `ProjectedHead`, rows of length 1 as embeddings."""

import numpy as np
import pytest
import torch
from conftest import timm_model
from torch import nn
from torch.nn import functional as F

import explainers
from explainers import posthoc
from explainers.errors import InputError
from explainers.likeness import vectors_of
from explainers.models import TargetModel, as_target
from explainers.models.functionals import head_functionals
from explainers.models.heads import NoHead, ProjectedHead, TextProjection
from explainers.models.plain import PlainBackbone

STATED = {"mean": 0.5, "std": 0.5, "image_size": 32}
CLASSES = torch.tensor([3, 0])
PROJECTION = torch.randn(8, 24, generator=torch.Generator().manual_seed(0))
PHOTOS = np.random.default_rng(1).integers(0, 256, (2, 40, 32, 3), dtype=np.uint8)


def directions(width):
    return F.normalize(torch.randn(5, width, generator=torch.Generator().manual_seed(1)), dim=-1)


class Net(nn.Module):
    """A backbone, and a function of its embedding and of the weights of a projection."""

    def __init__(self, encoder, function):
        super().__init__()
        self.encoder, self.function = encoder, function
        self.projection = nn.Linear(24, 8, bias=False)
        self.projection.load_state_dict({"weight": PROJECTION})

    def forward(self, x):
        embeddings = self.encoder(x)
        return self.function(embeddings, self.projection)


def over_length(e, _):
    return 7 * (e / e.norm(dim=1, keepdim=True)) @ directions(24).mT + 0.5


def projected(e, project):
    p = project(e)
    p /= torch.linalg.vector_norm(p, dim=-1).clamp(min=1e-8)[:, None].expand_as(p)
    return F.linear(p, 7 * directions(8), torch.full((5,), 0.5))


HEADS = {
    "normalize": lambda e, _: 7 * F.linear(F.normalize(e), directions(24)) + 0.5,
    "over its length": over_length,
    "cosine_similarity": lambda e, _: 7 * F.cosine_similarity(e[:, None], directions(24)[None], dim=-1) + 0.5,
    "projected": projected,
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_cosine_head_in_a_module_is_explained_as_a_projected_head(kind, images):
    vit, of_projection = timm_model(num_classes=0), kind == "projected"
    weights = (directions(8), PROJECTION) if of_projection else (directions(24), None)
    found = as_target(Net(vit, HEADS[kind]))
    wanted = TargetModel(vit, ProjectedHead(*weights, scale=7.0, bias=torch.full((5,), 0.5))).eval()
    for method, output in (("GAE", "logit"), ("DecompX-PLUS", "log_odds"), ("GradCAM", "log_odds")):
        methods = [posthoc.build(method, each, each.grid, {"output": output}) for each in (found, wanted)]
        torch.testing.assert_close(*[each(images[:2], CLASSES) for each in methods], rtol=1e-3, atol=1e-5)
    embeddings = torch.randn(2, 24)
    for classes in (None, CLASSES):
        both = [head_functionals(each.head, embeddings, 1.0, classes) for each in (found, wanted)]
        torch.testing.assert_close(*both, rtol=1e-3, atol=1e-5)


def test_a_length_that_nothing_is_divided_by_keeps_its_gradient():
    prototypes, embeddings = directions(24), torch.randn(2, 24)

    def distances(e):
        return -(e[:, None] - prototypes).norm(dim=-1)

    gaps = embeddings[:, None] - prototypes
    found = head_functionals(distances, embeddings)
    torch.testing.assert_close(found, -gaps / gaps.norm(dim=-1, keepdim=True))


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.last = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU()), nn.Linear(8, 6)

    def forward(self, x):
        return F.normalize(self.last(self.features(x).mean((2, 3))), dim=-1)


EMBEDDINGS = {
    "plain": Embeds,
    "of a ViT": lambda: timm_net(lambda e, _: F.normalize(e)),
    "projected": lambda: timm_net(lambda e, project: F.normalize(project(e), dim=-1)),
    "of an MLP": lambda: timm_net(lambda e, project: F.normalize(project(e).tanh(), dim=-1)),
}


def timm_net(function):
    return Net(timm_model(num_classes=0), function)


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_rows_of_length_1_are_embeddings_which_are_compared_as_the_model_does(kind, capsys, nothing_shipped):
    torch.manual_seed(0)
    net = EMBEDDINGS[kind]().eval()
    target = as_target(net, **STATED)
    line = next(line for line in capsys.readouterr().err.splitlines() if "embeddings" in line)
    assert "have length 1, so they are embeddings: without classes, compare(" in line
    assert isinstance(target.head, NoHead)
    with pytest.raises(InputError, match="without classes, compare.image, other, model. explains images, and target="):
        explainers.explain(PHOTOS[0], target)
    found = explainers.compare(*PHOTOS, target)
    with torch.no_grad():
        own, other = (net(target.normalise(seen[None])) for seen in (found.image, found.other))
    assert found.similarity == pytest.approx((own @ other.mT).item(), abs=1e-4)
    assert found.pairs.sum().item() == pytest.approx(found.similarity, abs=1e-4) and found.heatmap.std() > 0
    (nearest,) = explainers.nearest(PHOTOS[0], [PHOTOS[1]], target, k=1)
    assert nearest.similarity == pytest.approx(found.similarity, abs=1e-5)
    for settings in ({"score": "softmax"}, {"classes": list("abcdefgh")[: own.shape[1]]}):
        assert kind == "of a ViT" or as_target(net, **STATED, **settings).num_classes == own.shape[1]


def test_image_towers_are_compared_after_their_projection(nothing_shipped):
    target = TargetModel(timm_model(num_classes=0), TextProjection(PROJECTION)).eval()
    found = explainers.compare(*PHOTOS, target)
    with torch.no_grad():
        own, other = (target.embed(target.normalise(seen[None])) @ PROJECTION.mT for seen in (found.image, found.other))
    assert found.similarity == pytest.approx(F.cosine_similarity(own, other).item(), abs=1e-5)
    assert found.pairs.sum().item() == pytest.approx(found.similarity, abs=1e-4)


def test_vectors_after_a_projection_are_its_products_over_the_length(images):
    vit = timm_model(num_classes=0)
    found = as_target(Net(vit, lambda e, project: F.normalize(project(e), dim=-1)), **STATED)
    backbone = TargetModel(vit).eval()
    c, e = vectors_of(posthoc.build("DecompX-PLUS", backbone, backbone.grid), images[:2])
    size = (e @ PROJECTION.mT).norm(dim=-1)[:, None]
    vectors, embeddings = vectors_of(posthoc.build("DecompX-PLUS", found, found.grid), images[:2])
    torch.testing.assert_close(vectors, c @ PROJECTION.mT / size[..., None], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(embeddings, e @ PROJECTION.mT / size, rtol=1e-3, atol=1e-5)


NO_LOGITS = {
    "percent": (lambda y: 100 * y.softmax(-1), "expected logits of Sequential, got probabilities, which sum to 100"),
    "sigmoid in another shape": (lambda y: y.sigmoid()[..., None].squeeze(-1), "got probabilities of a sigmoid"),
    "tanh": (lambda y: y.tanh(), "got values of a tanh: give score=value"),
}


class Last(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("kind", NO_LOGITS)
def test_outputs_that_are_no_logits_are_refused_unless_they_are_values(kind):
    function, told = NO_LOGITS[kind]
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    net = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), *pooled, Last(function))
    with pytest.raises(InputError, match=told):
        as_target(net, **STATED)
    assert isinstance(as_target(net, **STATED, score="value").backbone, PlainBackbone)
