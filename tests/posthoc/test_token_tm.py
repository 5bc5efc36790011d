"""TokenTM, against a version that computes all matrices in full."""

import itertools

import pytest
import references_attention as slow
import torch
from references_attention import EVA, MODELS, SWIN, agree

from explainers.errors import InputError
from explainers.posthoc import token_tm
from explainers.posthoc.attention import GAE
from explainers.posthoc.token_tm import TokenTM, transformation_weights

CLASSES = torch.tensor([0, 1, 2, 3, 4])
OPTIONS = [
    dict(zip(("transformed", "scale", "heads", "mlp"), values, strict=True))
    for values in itertools.product(("values", "stream"), ("softmax", "mean"), ("together", "apart"), (True, False))
]
OPTIONS += [{"measured": "length"}, {"measured": "direction"}, {"measured": "direction", "scale": "softmax"}]
LIBRAGRAD = {"transformed": "stream", "scale": "softmax", "heads": "apart"}


@pytest.fixture(params=MODELS)
def model(request, make_target):
    name, arguments = MODELS[request.param]
    return make_target(name, **arguments)


def test_every_combination_of_options_is_its_formula_in_double_precision(model, grid, images):
    model = model.double()
    with slow.in_double():
        seen = slow.walk(model, model.normalise(images[1:2])[0])
        for options in OPTIONS:
            found = TokenTM(model, grid, **options)(images[1:2], torch.tensor([3]))[0]
            agree(found, slow.token_tm(seen, 3, **options), 1e-8)


@pytest.mark.parametrize("options", [{}, LIBRAGRAD], ids=["defaults", "libragrad"])
def test_single_precision_is_enough(model, grid, images, options):
    found = TokenTM(model, grid, **options)(images[1:2], torch.tensor([3]))[0]
    with slow.in_double():
        seen = slow.walk(model, model.double().normalise(images[1:2])[0])
        wanted = slow.token_tm(seen, 3, **options)
    agree(found, wanted, 1e-4)


def test_options_change_the_heatmap(target, grid, images):
    maps = [TokenTM(target, grid, **options)(images[:1], CLASSES[:1])[0] for options in OPTIONS]
    for one, other in itertools.combinations(maps, 2):
        assert (one / one.max() - other / other.max()).abs().max() > 1e-4


@pytest.mark.parametrize("measured", ["both", "length", "direction"])
@pytest.mark.parametrize("scale", ["softmax", "mean"])
def test_weights_of_random_tokens(scale, measured):
    before, after = torch.randn(2, 3, 7, 5, dtype=torch.double, generator=torch.Generator().manual_seed(2))
    found = transformation_weights(before, after, scale, measured)
    for i in range(3):
        agree(found[i], slow.token_weights(before[i], after[i], scale, measured), 1e-8)


def test_a_scale_of_correlations_that_are_left_out_is_refused(target, grid):
    with pytest.raises(InputError, match="no scale of correlations with measured=length, got scale=softmax"):
        TokenTM(target, grid, scale="softmax", measured="length")


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
    monkeypatch.setattr(token_tm, "transformation_weights", lambda before, *_: torch.ones(before.shape[:2]))
    found = TokenTM(target, grid, mlp=mlp)(images, CLASSES)
    backbone = target.backbone
    tokens = backbone.norm_pre(backbone._pos_embed(backbone.patch_embed(target.normalise(images))))
    lengths = tokens[:, 1:].norm(dim=-1).unflatten(1, (4, 4)).detach()
    torch.testing.assert_close(found, (8 if mlp else 1) * GAE(target, grid)(images, CLASSES) * lengths)
    with slow.in_double():
        seen = slow.walk(target, target.double().normalise(images[:1])[0])
        ones = slow.token_tm(seen, 0, mlp=mlp, weights_of=lambda before, *_: torch.ones(len(before)))
    agree(found[0], ones, 1e-4)


@pytest.mark.parametrize("options", [{}, LIBRAGRAD], ids=["defaults", "libragrad"])
def test_a_batch_is_its_images_alone_and_classes_matter(model, grid, images, options):
    method = TokenTM(model, grid, **options)
    found, other = method(images, CLASSES), method(images, (CLASSES + 1) % 5)
    assert found.shape == (5, 4, 4) and found.isfinite().all() and (found >= 0).all() and not found.requires_grad
    assert not method.ignores_classes
    for i in range(5):
        agree(found[i], method(images[i : i + 1], CLASSES[i : i + 1])[0], 1e-4)
        assert (found[i] - other[i]).abs().max() > 1e-3 * found[i].max()
    with torch.inference_mode():
        torch.testing.assert_close(method(images.clone(), CLASSES.clone()), found)
    functionals = torch.randn(2, 3, model.embed_dim, generator=torch.Generator().manual_seed(5))
    together = method.explain(images[:2], functionals)
    for i in range(3):
        torch.testing.assert_close(together[:, i], method.explain(images[:2], functionals[:, i]), rtol=1e-4, atol=1e-6)


def test_explaining_a_class_leaves_no_trace(make_target, grid, images):
    fresh, used = make_target(), make_target()
    TokenTM(used, grid)(images, CLASSES)
    found = TokenTM(used, grid)(images, (CLASSES + 2) % 5)
    assert torch.equal(found, TokenTM(fresh, grid)(images, (CLASSES + 2) % 5))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in used.modules())
    assert all(parameter.grad is None for parameter in used.parameters())


def test_other_weights_give_other_heatmaps(make_target, grid, images):
    found, other = (TokenTM(make_target(seed=seed), grid)(images, CLASSES) for seed in (0, 1))
    assert all((found[i] - other[i]).abs().max() > 0.05 * found[i].abs().max() for i in range(5))


def test_models_that_mix_tokens_otherwise_are_refused(make_target, grid, images):
    swin, arguments = SWIN
    with pytest.raises(InputError, match="global attention"):
        TokenTM(make_target(swin, **arguments), grid)
    with pytest.raises(InputError, match="pooling 'map'"):
        TokenTM(make_target(global_pool="map", class_token=False), grid)
    normalised_heads = make_target("eva02_small_patch14_224", **EVA, scale_attn_inner=True)
    with pytest.raises(InputError, match="normalises or gates"):
        TokenTM(normalised_heads, grid)(images, CLASSES)
    assert TokenTM(normalised_heads, grid, transformed="stream")(images, CLASSES).isfinite().all()
