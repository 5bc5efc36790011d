"""Maps of single layers against networks that start there, and their aggregations PLUS, SkipPLUS and Rollout."""

import math
from functools import partial
from typing import get_args

import pytest
import references_propagation as references
import references_relevance as relevance
import torch
from conftest import VITS, timm_model
from torch.nn import functional as F
from toys import assert_same

from explainers.models import TargetModel
from explainers.models.heads import ProjectedHead
from explainers.posthoc.attention import AttentionGradient, GenAtt, RawAttention
from explainers.posthoc.cam import ElementWiseCAM, GradCAM, GradCAMPlusPlus, HiResCAM, LayerCAM, XGradCAM, XGradCAMPlus
from explainers.posthoc.gradients import AttIxG, FullGrad, InputXGradient, TokenGradient
from explainers.posthoc.layerwise import PLUS, Rollout, SkipPLUS
from explainers.posthoc.propagation import LRP, AttnLRP, ConservativeLRP, DecompX, ResLRP
from explainers.posthoc.white_box import Output, class_functionals, sum_on_grid

SWIN = {"img_size": 32, "embed_dim": 12, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4}
FORMULAS = {
    FullGrad: references.full_grad,
    HiResCAM: references.input_x_gradient,
    partial(ResLRP, gamma=0.25): relevance.relevance_map(residual=0.25),
    InputXGradient: references.input_x_gradient,
    TokenGradient: references.token_gradient,
    GradCAM: references.grad_cam,
    XGradCAM: references.x_grad_cam,
    XGradCAMPlus: partial(references.x_grad_cam, sized=torch.abs),
    GradCAMPlusPlus: references.grad_cam_plus_plus,
    ElementWiseCAM: references.element_wise_cam,
    LayerCAM: references.layer_cam,
    AttIxG: references.att_ixg,
    AttentionGradient: references.attention_gradient,
    GenAtt: references.gen_att,
    DecompX: references.decompx,
    AttnLRP: relevance.attn_lrp,
    ConservativeLRP: relevance.conservative_lrp,
    ResLRP: relevance.res_lrp,
    LRP: relevance.lrp,
}
RECTIFIED = GradCAM, GradCAMPlusPlus, LayerCAM
"""Those whose papers have a ReLU; of GradCAMElementWise no score is negative."""
OF_EACH_KIND = [InputXGradient, GradCAMPlusPlus, AttIxG, AttentionGradient, GenAtt, DecompX, ResLRP, LRP, FullGrad]
"""Methods that record different tensors, or have different rules."""
LABELS = torch.tensor([3, 0, 4, 1, 2])


@pytest.fixture(scope="module")
def models():
    """A ViT of each kind in double precision."""
    return {
        kind: references.in_double(timm_model(name, as_target=True, **arguments))
        for kind, (name, arguments) in VITS.items()
    }


@pytest.mark.parametrize("method", FORMULAS, ids=lambda method: getattr(method, "__name__", "ResLRP of 0.25"))
def test_the_map_of_a_layer_is_that_of_the_network_from_this_layer_on(models, grid, images, method):
    """Of all kinds of models for methods that record different tensors."""
    is_cam = isinstance(method, type) and issubclass(method, GradCAM)
    for kind, layer in (
        (("scaled", 1), ("distilled", -1), ("average", 0)) if method in OF_EACH_KIND else [("scaled", 1)]
    ):
        model = models[kind]
        index = range(len(model.backbone.blocks))[layer]
        expected = references.maps(model, images[:2], LABELS[:2], index, FORMULAS[method])
        of = partial(method, model, grid, layer=layer, **{"tokens": "input"} if is_cam else {})
        assert_same((of(relu=False) if is_cam else of())(images[:2], LABELS[:2]), expected)
        if is_cam:
            assert_same(of()(images[:2], LABELS[:2]), expected.clamp(min=0) if method in RECTIFIED else expected)


@pytest.mark.parametrize("kind", VITS)
def test_plus_sums_the_maps_of_all_layers_and_skipplus_those_from_the_middle(models, grid, images, kind):
    """SkipPLUS, Equations 3 and 4, m = ⌈L / 2⌉; of one method with every network run again from its own input."""
    count = len(models[kind].backbone.blocks)
    for aggregation, first in ((PLUS, 0), (SkipPLUS, -(-count // 2))):
        expected = references.sums(models[kind], images[:1], LABELS[:1], first, FORMULAS[AttIxG])
        assert_same(aggregation(models[kind], grid, AttIxG)(images[:1], LABELS[:1]), expected)
        for method in OF_EACH_KIND:
            raw = {"tokens": "input", "relu": False} if issubclass(method, GradCAM) else {}
            of_layers = [method(models[kind], grid, layer=layer, **raw) for layer in range(first, count)]
            if method is not FullGrad:  # which counts each bias once
                found = aggregation(models[kind], grid, method)(images[:2], LABELS[:2])
                assert_same(found, sum(of(images[:2], LABELS[:2]).double() for of in of_layers))


@pytest.mark.parametrize("global_pool", ["token", "avg"])
def test_rollout_is_the_product_over_layers(make_target, grid, images, global_pool):
    """SkipPLUS, Equation 2, with whole matrices; then the row of the class token, or the mean row of the patches."""
    target = references.in_double(make_target(depth=3, global_pool=global_pool))
    heatmaps = Rollout(target, grid, RawAttention)(images, LABELS)
    for image, heatmap in zip(images[:2], heatmaps[:2], strict=True):
        result = torch.eye(17, dtype=torch.double)
        for block in references.walk(target, references.entering(target, image))[0]:
            result = (0.5 * torch.eye(17) + 0.5 * sum(block.weights) / len(block.weights)) @ result
        row = result[1:].mean(0) if global_pool == "avg" else result[0]
        assert_same(heatmap[None], references.on_grid(target, row)[None])


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("scale", [1, 1e4])  # with 1e4, the likeliest class has a probability of 1
def test_functionals_of_outputs_are_rows_of_the_head_and_their_contrasts(make_model, cosine, scale):
    """Rows of a cosine head are scale W_y / |e|: the gradient of the cosine would subtract their part along e."""
    weight, embeddings = F.normalize(torch.randn(5, 24), dim=-1), torch.randn(len(LABELS), 24)
    head = ProjectedHead(weight, scale=7.0 * scale, normalise=cosine)
    target = TargetModel(make_model(), head).eval()
    found = {output: class_functionals(target, embeddings, LABELS, output) for output in get_args(Output)}
    for i, (e, label) in enumerate(zip(embeddings, LABELS.tolist(), strict=True)):
        rows = 7 * scale * weight / (e.norm() if cosine else 1)
        logits = (rows @ e).double().tolist()
        p = torch.tensor([math.exp(z - max(logits)) for z in logits])
        others = [k for k in range(5) if k != label]
        highest = max(logits[k] for k in others)
        odds = torch.tensor([math.exp(logits[k] - highest) for k in others])
        expected = {"logit": rows[label], "probability": (p / p.sum())[label] * (rows[label] - p @ rows / p.sum())}
        expected["log_odds"] = rows[label] - odds @ rows[others] / odds.sum()
        for output, functional in expected.items():
            torch.testing.assert_close(found[output][i] / scale, functional / scale, rtol=1e-3, atol=1e-4)


def test_the_log_odds_of_a_single_logit_are_the_logit(make_model):
    """Its head has the two logits ∓ z / 2."""
    target, embeddings = TargetModel(make_model(num_classes=1), score="sigmoid").eval(), torch.randn(2, 24)
    of_half = class_functionals(target, embeddings, torch.tensor([1, 0]))
    assert of_half.abs().max() > 0
    torch.testing.assert_close(class_functionals(target, embeddings, torch.tensor([1, 0]), "log_odds"), 2 * of_half)


@pytest.mark.parametrize("method", [GradCAM, DecompX, ResLRP])
def test_plus_sums_feature_maps_of_a_swin_on_one_grid(make_target, grid, images, method):
    """The layers have 8 × 8, 8 × 8 and 4 × 4 positions, and the grid 4 × 4 patches."""
    target = references.in_double(make_target("swin_tiny_patch4_window7_224", **SWIN))
    of_inputs = {"tokens": "input", "relu": False} if issubclass(method, GradCAM) else {}
    single = sum(method(target, grid, layer=layer, **of_inputs)(images, LABELS) for layer in range(3))
    assert_same(PLUS(target, grid, method)(images, LABELS), single)
    assert single.abs().max() > 0


def test_the_map_of_a_swin_is_where_its_features_are(make_target, grid, images):
    """Input × Gradient of the first layer, by hand; four positions make one patch."""
    target = references.in_double(make_target("swin_tiny_patch4_window7_224", **SWIN))
    seen = []
    target.backbone.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits = target.head.weight[LABELS].double() * target.embed(target.normalise(images))
    (gradient,) = torch.autograd.grad(logits.sum(), seen)
    scores = (seen[0] * gradient).sum(-1).detach()
    expected = torch.zeros(5, 4, 4, dtype=torch.double)
    for row in range(8):
        for column in range(8):
            expected[:, row // 2, column // 2] += scores[:, row, column]
    assert_same(InputXGradient(target, grid, layer=0)(images, LABELS), expected)


@pytest.mark.parametrize("shape", [(8, 8), (2, 2), (5, 5), (6, 3)])
def test_scores_on_another_grid_keep_their_sum_and_place(shape):
    """A ViT with 16 × 16 tokens can be explained on 14 × 14 patches."""
    scores = torch.randn(2, 3, *shape)
    resampled = sum_on_grid(scores, (4, 4))
    assert resampled.shape == (2, 3, 4, 4) and sum_on_grid(scores, (2, 3)).shape == (2, 3, 2, 3)
    torch.testing.assert_close(resampled.sum((-2, -1)), scores.sum((-2, -1)))
    corner = torch.zeros(*shape)
    corner[0, -1] = 1
    assert sum_on_grid(corner, (2, 3)).max() == sum_on_grid(corner, (2, 3))[0, -1] > 0
    if shape == (8, 8):
        torch.testing.assert_close(resampled, 4 * F.avg_pool2d(scores, 2))
