"""Relevance propagation, R of the output → R of the inputs, through a ViT that is walked by hand.

Relevance is a tensor here, as in the papers, and not a changed gradient. For double precision alone: divisions by small
sums lose digits. `x`, `layer` and `v` are those of `references_propagation`.
"""

import math

import torch
from references_propagation import on_grid, slices, walk
from torch import nn


def through_linear(module, x, y, relevance, positive):
    """R_j = Σ_i x_j w_ij / y_i R_i; or with the positive parts of the summands, and their sum, alone (α = 1)."""
    result = torch.zeros_like(x)
    for token in range(len(x)):
        summands = x[token] * module.weight  # (outputs, inputs)
        sums = y[token]
        if positive:
            summands = summands.clamp(min=0)
            sums = summands.sum(1)
        result[token] = (summands / sums[:, None] * relevance[token][:, None]).sum(0)
    return result


def through_norm(module, x, y, relevance):
    """LayerNorm is linear, by a matrix diag(γ) (I − 1/D) / σ for each token, because σ is a constant."""
    if isinstance(module, nn.Identity):
        return relevance
    result = torch.zeros_like(x)
    for token in range(len(x)):
        deviation = (x[token].var(correction=0) + module.eps).sqrt()
        matrix = module.weight[:, None] * (torch.eye(x.shape[1], dtype=x.dtype) - 1 / x.shape[1]) / deviation
        result[token] = (matrix * x[token] / y[token][:, None] * relevance[token][:, None]).sum(0)
    return result


def through_residual(rule, x, update, relevance):
    """The relevance of both summands: `sum`, `conserved` (Transformer Attribution), or γ of ResLRP, a number."""
    y = x + update
    if rule not in ("sum", "conserved"):
        weights = [1 + rule * (summand * y > 0) for summand in (x, update)]
        total = weights[0] * x + weights[1] * update
        return weights[0] * x / total * relevance, weights[1] * update / total * relevance
    shares = [summand / y * relevance for summand in (x, update)]
    if rule == "sum":
        return shares
    a, b = (share.sum() for share in shares)
    size = a.abs() + b.abs()
    return [share * (part.abs() / size * relevance.sum() / part) for share, part in zip(shares, (a, b), strict=True)]


def through_attention(at, relevance, frozen):
    """Relevance of the output of all heads → of queries, keys and values, and of the attention weights of each head.

    Of the product A v, a half goes to each factor, and likewise of q · k; with frozen attention, all of it to v.
    """
    width = at.x.shape[1] // len(at.weights)
    result, of_weights = torch.zeros_like(at.qkv), []
    for head, (scores, weights) in enumerate(zip(at.scores, at.weights, strict=True)):
        q_at, k_at, v_at = (slices(head + part * len(at.weights), width) for part in range(3))
        q, k, v = at.qkv[:, q_at], at.qkv[:, k_at], at.qkv[:, v_at]
        output, share = at.heads[:, slices(head, width)], relevance[:, slices(head, width)]
        products = weights[:, :, None] * v[None]  # (to, from, channel)
        parts = products / output[:, None] * share[:, None]
        result[:, v_at] = parts.sum(0) * (1 if frozen else 0.5)
        of_weights.append(parts.sum(2) * 0.5)
        if frozen:
            continue
        of_scores = torch.zeros_like(scores)
        for row in range(len(scores)):  # the softmax's own Taylor expansion (AttnLRP, Proposition 3.1)
            of_scores[row] = scores[row] * (of_weights[-1][row] - weights[row] * of_weights[-1][row].sum())
        parts = q[:, None] * k[None] / math.sqrt(width) / scores[:, :, None] * of_scores[:, :, None]
        result[:, q_at], result[:, k_at] = 0.5 * parts.sum(1), 0.5 * parts.sum(0)
    return result, of_weights


def relevance(target, x, layer, v, frozen=False, gelu="passes", positive=False, residual="sum"):
    """The relevance of the tokens that enter block `layer` (T, D), and of attention weights, for each block and head.

    Args: frozen: attention weights are constants. gelu: relevance `passes`, or is input times `gradient`. positive: the
    α = 1 rule of linear layers. residual: see `through_residual`.
    """
    blocks, end = walk(target, x, layer)
    of_embedding = v * end.embedding
    if positive:
        of_embedding = of_embedding.clamp(min=0) / of_embedding.clamp(min=0).sum()
    if not target.distilled:
        norm = target.backbone.fc_norm
        of_embedding = through_norm(norm, end.pooled[None], end.embedding[None], of_embedding[None])[0]
    of_normed = torch.zeros_like(end.normed)
    prefix, width = target.backbone.num_prefix_tokens, x.shape[1]
    if target.distilled:
        of_normed[0], of_normed[1] = of_embedding[:width], of_embedding[width:]
    elif target.backbone.global_pool == "avg":
        count = len(x) - prefix
        of_normed[prefix:] = end.normed[prefix:] / count / end.pooled * of_embedding
    else:
        of_normed[0] = of_embedding
    read_tokens = of_normed.abs().sum(1) > 0
    result = torch.zeros_like(end.x)
    result[read_tokens] = through_norm(
        target.backbone.norm, end.x[read_tokens], end.normed[read_tokens], of_normed[read_tokens]
    )
    attention = []
    for at in reversed(blocks):
        block = at.module
        of_middle, result = through_residual(residual, at.middle, at.updated, result)
        result = through_linear(block.mlp.fc2, at.active, at.contracted, result, positive)
        if gelu == "gradient":
            h = at.hidden
            slope = 0.5 * (1 + torch.erf(h / math.sqrt(2))) + h * torch.exp(-(h**2) / 2) / math.sqrt(2 * math.pi)
            result = h * slope / at.active * result
        result = through_linear(block.mlp.fc1, at.normed_middle, at.hidden, result, positive)
        of_middle = of_middle + through_norm(block.norm2, at.middle, at.normed_middle, result)
        of_x, result = through_residual(residual, at.x, at.attended, of_middle)
        result = through_linear(block.attn.proj, at.heads, at.projected, result, positive)
        result, of_weights = through_attention(at, result, frozen)
        attention.insert(0, of_weights)
        result = through_linear(block.attn.qkv, at.normed, at.qkv, result, positive)
        result = of_x + through_norm(block.norm1, at.x, at.normed, result)
    return result.detach(), attention


def relevance_map(**rules):
    return lambda target, x, layer, v: on_grid(target, relevance(target, x, layer, v, **rules)[0].sum(1))


attn_lrp = relevance_map()
conservative_lrp = relevance_map(frozen=True, gelu="gradient")
res_lrp = relevance_map(residual=1.0)
lrp = relevance_map(positive=True, residual="conserved")
