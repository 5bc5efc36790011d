"""AttnLRP and DecompX against the rules of LXT, by AttnLRP's authors, and LRP's rules against zennit's.

Peers propagate relevance R as tensors; here it is a tensor times its changed gradient. DecompX has no package: it is
compared with its formula in `test_propagation`.
"""

import pytest
import references_propagation as references
import torch
from torch import nn
from toys import assert_same

from explainers import posthoc
from explainers.transformer import rules
from explainers.transformer.recording import Record

EXACT = {"epsilon": 1e-12}
"""Peers add a small ε to divisors, against rounding in single precision; these tests are in double precision."""
LABELS = [3, 0]


@pytest.fixture(scope="module")
def lxt():
    return pytest.importorskip("lxt.explicit.functional", reason="LXT is not installed: make peers")


@pytest.fixture(scope="module")
def zennit():
    return pytest.importorskip("zennit.rules", reason="zennit is not installed: make peers")


def norm(lxt, module, x):
    if isinstance(module, nn.Identity):
        return x
    deviation = (x.var(-1, correction=0, keepdim=True) + module.eps).sqrt().detach()
    centred = lxt.add2(x, lxt.mul2(lxt.mean(x, -1, True, **EXACT), -1), **EXACT)
    scaled = lxt.mul2(centred, module.weight.detach() / deviation)
    return lxt.add2(scaled, module.bias, **EXACT)


def scale(lxt, module, x):
    return x if isinstance(module, nn.Identity) else lxt.mul2(x, module.gamma.detach())


def linear(lxt, module, x):
    return lxt.linear_epsilon(x, module.weight, module.bias, **EXACT)


def attention(lxt, module, x, frozen):
    """The attention of timm, one head after the other, in LXT's functions."""
    width = x.shape[1] // module.num_heads
    q, k, v = linear(lxt, module.qkv, x).split(x.shape[1], 1)
    heads = []
    for head in range(module.num_heads):
        of_head = [part[:, references.slices(head, width)] for part in (q, k, v)]
        scores = lxt.mul2(lxt.matmul(of_head[0], of_head[1].T, **EXACT), width**-0.5)
        weights = lxt.softmax(scores, -1)
        if frozen:  # the product is linear in the values
            heads.append(lxt.linear_epsilon(of_head[2].T, weights.detach(), **EXACT).T)
        else:
            heads.append(lxt.matmul(weights, of_head[2], **EXACT))
    return linear(lxt, module.proj, torch.cat(heads, 1))


def relevance(lxt, target, x, v, frozen):
    """The relevance of tokens x (T, D) that enter the first block for v · e, which LXT's backward pass computes."""
    from lxt.explicit.rules import identity

    tokens = x = x.clone().requires_grad_()
    for block in target.backbone.blocks:
        update = attention(lxt, block.attn, norm(lxt, block.norm1, x), frozen)
        x = lxt.add2(x, scale(lxt, block.ls1, update), **EXACT)
        hidden = linear(lxt, block.mlp.fc1, norm(lxt, block.norm2, x))
        update = linear(lxt, block.mlp.fc2, identity(nn.functional.gelu, hidden))
        x = lxt.add2(x, scale(lxt, block.ls2, update), **EXACT)
    x = norm(lxt, target.backbone.norm, x)
    prefix = target.backbone.num_prefix_tokens
    if target.distilled:
        embedding = torch.cat([x[0], x[1]])
    elif target.backbone.global_pool == "avg":
        embedding = lxt.mean(x[prefix:], 0, False, **EXACT)
    else:
        embedding = x[0]
    if not target.distilled:
        embedding = norm(lxt, target.backbone.fc_norm, embedding[None])[0]
    score = lxt.linear_epsilon(embedding[None], v[None], **EXACT).sum()
    return torch.autograd.grad(score, tokens, score.detach())[0]


@pytest.mark.parametrize(("method", "frozen"), [("AttnLRP", False), ("DecompX", True)])
def test_relevance_of_tokens_is_that_of_lxt(lxt, double, grid, images, method, frozen):
    """DecompX is AttnLRP with constant attention, which LXT calls CP-LRP inside the attention."""
    expected = []
    for image, label in zip(images, LABELS, strict=False):
        tokens, v = references.entering(double, image), references.of_class(double, label).double()
        of_tokens = relevance(lxt, double, tokens.detach(), v, frozen)
        expected.append(references.on_grid(double, of_tokens.sum(1)))
    assert_same(posthoc.build(method, double, grid)(images[:2], torch.tensor(LABELS)), torch.stack(expected))


RULES = {
    "epsilon": (rules.Rules(activation="ratio"), lambda zennit: zennit.Epsilon(1e-12)),
    "alpha 1, beta 0": (
        rules.Rules(activation="ratio", linear="positive"),
        lambda zennit: zennit.AlphaBeta(alpha=1, beta=0, stabilizer=1e-12, zero_params="bias"),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_relevance_through_an_mlp_is_that_of_zennit(zennit, double, rule):
    """zennit has rules for linear layers, and passes the relevance of an activation on; it has none for attention."""
    mlp = double.backbone.blocks[0].mlp
    ours, of_linear = RULES[rule]
    x = torch.randn(7, 24, dtype=torch.double, requires_grad=True)
    record = Record((), ours, attention=False)
    record.entered = 1
    with record:
        y = mlp.fc2(mlp.act(mlp.fc1(x)))
    of_y = torch.randn(y.shape, dtype=torch.double)
    found = x.detach() * torch.autograd.grad(y, x, of_y / y.detach())[0]
    hooks = [of_linear(zennit).register(mlp.fc1), zennit.Pass().register(mlp.act), of_linear(zennit).register(mlp.fc2)]
    try:
        expected = torch.autograd.grad(mlp.fc2(mlp.act(mlp.fc1(x))), x, of_y)[0]
    finally:
        for hook in hooks:
            hook.remove()
    assert_same(found, expected)
