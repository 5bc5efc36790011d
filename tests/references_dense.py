"""Grad-ECLIP, MaskCLIP and NACLIP, written out for one image that `references_attention.walk` ran."""

import math

import torch
from references_attention import normalise_tokens, readers, scale_of


def cosine(a, b):
    return (a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt())


def projected(seen, heads):
    """What the last block adds to a token, if its heads together return `heads` (C,)."""
    block = seen.target.backbone.blocks[-1]
    return scale_of(block, 1) * (block.attn.proj.weight @ heads + block.attn.proj.bias)


def grad_eclip(seen, functional, layers=1, similarity="heads"):
    """H_i = ReLU(Σ_layers Σ_c w_c λ_i v_i^c) of one image: (N,)."""
    rows, prefix = readers(seen.target, len(seen.inputs[0])), seen.target.backbone.num_prefix_tokens
    through = (lambda x: projected(seen, x)) if similarity == "projected" else (lambda x: x)
    total = torch.zeros(len(seen.inputs[0]) - prefix)
    for layer in range(len(seen.inputs) - layers, len(seen.inputs)):
        (gradient,) = torch.autograd.grad(seen.embedding @ functional, seen.mixed[layer], retain_graph=True)
        w = sum(gradient[i] for i in rows)
        alike = []
        for key in seen.keys[layer][prefix:]:
            alike.append(sum(cosine(through(seen.queries[layer][i]), through(key)) for i in rows) / len(rows))
        low, high = min(alike), max(alike)
        for i, value in enumerate(seen.values[layer][prefix:]):
            total[i] += sum(w[c] * (alike[i] - low) / (high - low) * value[c] for c in range(len(w)))
    return total.clamp(min=0).detach()


def similarity(seen, functional, token):
    """v · e / ‖e‖, where e embeds a token of the last block."""
    backbone = seen.target.backbone
    embedded = normalise_tokens(backbone.fc_norm, normalise_tokens(backbone.norm, token))
    return (functional * embedded).sum() / embedded.square().sum().sqrt()


def mask_clip(seen, functional, block="values"):
    found, last = [], seen.target.backbone.blocks[-1]
    for i in range(seen.target.backbone.num_prefix_tokens, len(seen.inputs[-1])):
        token = projected(seen, seen.values[-1][i])
        if block == "whole":
            token = seen.inputs[-1][i] + token
            token = token + scale_of(last, 2) * last.mlp(normalise_tokens(last.norm2, token)[None])[0]
        found.append(similarity(seen, functional, token))
    return torch.stack(found).detach()


def naclip(seen, functional, std=5.0):
    heads, tokens = seen.target.backbone.blocks[-1].attn.num_heads, len(seen.inputs[-1])
    prefix = seen.target.backbone.num_prefix_tokens
    side, found = math.isqrt(tokens - prefix), []
    for i in range(prefix, tokens):
        mixed = []
        for h in range(heads):
            keys, values = seen.keys[-1].chunk(heads, -1)[h], seen.values[-1].chunk(heads, -1)[h]
            scores = torch.zeros(tokens)
            for j in range(tokens):
                scores[j] = (keys[i] * keys[j]).sum() / math.sqrt(keys.shape[-1])
                if j >= prefix:
                    (row, column), (other_row, other_column) = divmod(i - prefix, side), divmod(j - prefix, side)
                    rows, columns = row - other_row, column - other_column
                    scores[j] += math.exp(-(rows**2 + columns**2) / (2 * std**2))
            weights = scores.exp() / scores.exp().sum()
            mixed.append(sum(weights[j] * values[j] for j in range(tokens)))
        found.append(similarity(seen, functional, projected(seen, torch.cat(mixed))))
    return torch.stack(found).detach()
