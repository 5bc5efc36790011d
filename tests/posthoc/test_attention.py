"""Methods that read attention, against versions for one image that compute all matrices and vectors in full."""

import itertools

import pytest
import references_attention as slow
import torch
from references_attention import MODELS, agree

from explainers import posthoc
from explainers.posthoc.attention import transformation_weights

CLASSES = torch.tensor([0, 1, 2, 3, 4])
TOKEN_TM = [
    dict(zip(("transformed", "scale", "heads", "mlp"), values, strict=True))
    for values in itertools.product(("values", "stream"), ("softmax", "mean"), ("together", "apart"), (True, False))
]
TOKEN_TM += [{"measured": "length"}, {"measured": "direction"}, {"measured": "direction", "scale": "softmax"}]


def build(name, target, grid, **options):
    name, _, signed = name.partition(" of ")
    options |= {"relu": False} if signed else {"steps": 4} if name == "TAM" else {}
    return posthoc.build(name, target, grid, options)


@pytest.fixture(params=MODELS)
def model(request, make_target):
    name, arguments = MODELS[request.param]
    return make_target(name, **arguments)


def wanted_maps(target, image, label):
    """Compute every method's heatmap with full matrices; relevance only for models without SwiGLU."""
    seen = slow.walk(target, target.double().normalise(image[None])[0])
    layers = range(len(seen.inputs))
    added, norms = ([of(seen, layer) for layer in layers] for of in (slow.att_in, slow.glob_enc))
    distances = [slow.alti(seen, layer, seen.middles[layer].detach()) for layer in layers]
    halves = [(torch.eye(len(each)) + each / each.sum(1, keepdim=True)) / 2 for each in added]
    maps = {
        "AttIN": slow.on_patches(seen, added[-1]),
        "AttIN-Rollout": slow.on_patches(seen, slow.product(halves)),
        "AttIN-PLUS": sum(slow.on_patches(seen, each) for each in added),
        "GlobEnc": slow.on_patches(seen, norms[-1]),
        "GlobEnc-Rollout": slow.on_patches(seen, slow.product(norms)),
        "GlobEnc-PLUS": sum(slow.on_patches(seen, each) for each in norms),
        "ALTI": slow.on_patches(seen, distances[-1]),
        "ALTI-Rollout": slow.on_patches(seen, slow.product(distances)),
        "RawAttention": slow.raw_attention(seen),
        "AttentionRollout": slow.attention_rollout(seen),
        "AttentionGradCAM": slow.attention_grad_cam(seen, label),
        "AttentionGradCAM of both signs": slow.attention_grad_cam(seen, label, relu=False),
        "GenAtt": slow.on_patches(seen, slow.gen_att(seen, label)[-1]),
        "GAE": slow.gae(seen, label),
        "GradSAM": slow.grad_sam(seen, label),
        "TAM": slow.tam(target, target.normalise(image[None])[0], label, steps=4),
        "LeGrad": slow.le_grad(seen, label),
    }
    if not has_relevance(target):
        return maps
    relevance = slow.lrp_of_attention(target, image, label)
    return maps | {
        "PartialLRP": slow.partial_lrp(seen, relevance),
        "TransformerAttribution": slow.transformer_attribution(seen, label, relevance),
    }


def test_every_method_is_its_formula_in_double_precision(model, grid, images):
    model = model.double()
    with slow.in_double():
        for name, wanted in wanted_maps(model, images[1], label=3).items():
            found = build(name, model, grid)(images[1:2], torch.tensor([3]))[0]
            assert found.dtype == torch.double
            agree(found, wanted, 1e-8)


def test_options_are_their_formulas(model, grid, images):
    """Where ALTI's sums end, the layer where TransformerAttribution starts, and all options of TokenTM."""
    model = model.double()
    with slow.in_double():
        seen = slow.walk(model, model.normalise(images[1:2])[0])
        for layer, output in enumerate(seen.outputs):
            found = posthoc.ALTI(model, grid, layer=layer, sum_to="block")(images[1:2], CLASSES[:1])[0]
            agree(found, slow.on_patches(seen, slow.alti(seen, layer, output.detach())), 1e-8)
        for options in TOKEN_TM if len(model.backbone.blocks) == 3 else TOKEN_TM[::5]:
            found = posthoc.TokenTM(model, grid, **options)(images[1:2], torch.tensor([3]))[0]
            agree(found, slow.token_tm(seen, 3, **options), 1e-8)
        if len(model.backbone.blocks) == 3 and has_relevance(model):
            relevance = slow.lrp_of_attention(model, images[1], 3)
            found = posthoc.TransformerAttribution(model, grid, start=1)(images[1:2], torch.tensor([3]))[0]
            agree(found, slow.transformer_attribution(seen, 3, relevance, start=1), 1e-8)


def has_relevance(target):
    """The reference has no rules for SwiGLU."""
    return not (hasattr(target.backbone.blocks[0].mlp, "fc1_x") or "eva" in target.name)


def test_weights_of_tokens_that_stay_are_equal_and_of_tokens_that_turn_are_less():
    tokens = torch.eye(4)[None]
    torch.testing.assert_close(transformation_weights(tokens, tokens), torch.ones(1, 4))
    torch.testing.assert_close(transformation_weights(tokens, tokens, "softmax"), torch.full((1, 4), 0.25))
    turned = tokens.clone()
    turned[0, 0] *= -1
    assert transformation_weights(tokens, turned)[0].argmin() == 0
    assert transformation_weights(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)).isfinite().all()
