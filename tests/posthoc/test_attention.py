"""Methods that read attention, against versions for one image that compute all matrices and vectors in full."""

import itertools

import pytest
import references_attention as slow
import torch
from references_attention import MODELS, agree

from explainers import posthoc
from explainers.errors import InputError
from explainers.posthoc.attention import transformation_weights

CLASSES = torch.tensor([0, 1, 2, 3, 4])
SPECIFIC = ["AttentionGradCAM", "GenAtt", "GAE", "GradSAM", "PartialLRP", "TransformerAttribution", "TAM", "LeGrad"]
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
    if hasattr(target.backbone.blocks[0].mlp, "fc1_x") or "eva" in target.name:
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


def test_options_of_alti_and_token_tm_are_their_formulas(model, grid, images):
    model = model.double()
    with slow.in_double():
        seen = slow.walk(model, model.normalise(images[1:2])[0])
        for layer, output in enumerate(seen.outputs):
            found = posthoc.ALTI(model, grid, layer=layer, sum_to="block")(images[1:2], CLASSES[:1])[0]
            agree(found, slow.on_patches(seen, slow.alti(seen, layer, output.detach())), 1e-8)
        for options in TOKEN_TM if len(model.backbone.blocks) == 3 else TOKEN_TM[::5]:
            found = posthoc.TokenTM(model, grid, **options)(images[1:2], torch.tensor([3]))[0]
            agree(found, slow.token_tm(seen, 3, **options), 1e-8)


def test_transformer_attribution_from_its_second_layer_on(make_target, grid, images):
    target = make_target(depth=3).double()
    with slow.in_double():
        seen = slow.walk(target, target.normalise(images[:1])[0])
        relevance = slow.lrp_of_attention(target, images[0], 2)
        wanted = slow.transformer_attribution(seen, 2, relevance, start=1)
        found = posthoc.TransformerAttribution(target, grid, start=1)(images[:1], torch.tensor([2]))[0]
        agree(found, wanted, 1e-8)
        everything = posthoc.TransformerAttribution(target, grid)(images[:1], torch.tensor([2]))[0]
        assert (everything - found).abs().max() > 1e-3 * found.abs().max()


@pytest.mark.parametrize("name", SPECIFIC)
def test_each_of_several_functionals_is_itself_alone(make_target, grid, images, name):
    model = make_target("deit_tiny_distilled_patch16_224")
    # Of AttentionGradCAM both signs, because a positive part of random weights is often empty
    method = build(name.replace("CAM", "CAM of both signs"), model, grid)
    functionals = torch.randn(2, 3, model.embed_dim, generator=torch.Generator().manual_seed(5))
    together = method.explain(images[:2], functionals)
    for i in range(3):
        torch.testing.assert_close(together[:, i], method.explain(images[:2], functionals[:, i]), rtol=1e-4, atol=1e-6)


def test_attention_pooling_is_refused(make_target, grid):
    with pytest.raises(InputError, match="pooling 'map'"):
        posthoc.GAE(make_target(global_pool="map", class_token=False), grid)


def test_weights_of_tokens_that_stay_are_equal_and_of_tokens_that_turn_are_less():
    tokens = torch.eye(4)[None]
    torch.testing.assert_close(transformation_weights(tokens, tokens), torch.ones(1, 4))
    torch.testing.assert_close(transformation_weights(tokens, tokens, "softmax"), torch.full((1, 4), 0.25))
    turned = tokens.clone()
    turned[0, 0] *= -1
    assert transformation_weights(tokens, turned)[0].argmin() == 0
    assert transformation_weights(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)).isfinite().all()


@pytest.mark.parametrize("mlp", [True, False])
def test_without_transformations_it_is_gae_times_the_lengths_of_the_tokens(make_target, grid, images, mlp, monkeypatch):
    """W = 1: U_attention = I + T and U_MLP = 2 I, so R = 2^L Π (I + T_l) diag(‖E_i‖), without 2^L if mlp=False."""
    target = make_target(depth=3)
    monkeypatch.setattr(posthoc.attention, "transformation_weights", lambda before, *_: torch.ones(before.shape[:2]))
    found = posthoc.TokenTM(target, grid, mlp=mlp)(images, CLASSES)
    backbone = target.backbone
    tokens = backbone.norm_pre(backbone._pos_embed(backbone.patch_embed(target.normalise(images))))
    lengths = tokens[:, 1:].norm(dim=-1).unflatten(1, (4, 4)).detach()
    torch.testing.assert_close(found, (8 if mlp else 1) * posthoc.GAE(target, grid)(images, CLASSES) * lengths)
    with slow.in_double():
        seen = slow.walk(target, target.double().normalise(images[:1])[0])
        ones = slow.token_tm(seen, 0, mlp=mlp, weights_of=lambda before, *_: torch.ones(len(before)))
    agree(found[0], ones, 1e-4)
