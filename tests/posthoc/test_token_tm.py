"""TokenTM, against a version that computes all matrices in full."""

import itertools

import pytest
import references_attention as slow
import torch
from references_attention import MODELS, agree

from explainers.posthoc import attention
from explainers.posthoc.attention import GAE, TokenTM, transformation_weights

CLASSES = torch.tensor([0, 1, 2, 3, 4])
OPTIONS = [
    dict(zip(("transformed", "scale", "heads", "mlp"), values, strict=True))
    for values in itertools.product(("values", "stream"), ("softmax", "mean"), ("together", "apart"), (True, False))
]
OPTIONS += [{"measured": "length"}, {"measured": "direction"}, {"measured": "direction", "scale": "softmax"}]


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
    monkeypatch.setattr(attention, "transformation_weights", lambda before, *_: torch.ones(before.shape[:2]))
    found = TokenTM(target, grid, mlp=mlp)(images, CLASSES)
    backbone = target.backbone
    tokens = backbone.norm_pre(backbone._pos_embed(backbone.patch_embed(target.normalise(images))))
    lengths = tokens[:, 1:].norm(dim=-1).unflatten(1, (4, 4)).detach()
    torch.testing.assert_close(found, (8 if mlp else 1) * GAE(target, grid)(images, CLASSES) * lengths)
    with slow.in_double():
        seen = slow.walk(target, target.double().normalise(images[:1])[0])
        ones = slow.token_tm(seen, 0, mlp=mlp, weights_of=lambda before, *_: torch.ones(len(before)))
    agree(found[0], ones, 1e-4)
