"""Paths from patches to the embedding, for one image in double precision: autograd, and loops over patches."""

import references_attention as slow
import torch


def frozen(norm, x):
    """LayerNorm whose standard deviation has no gradient."""
    if isinstance(norm, torch.nn.Identity):
        return x
    deviation = ((x - x.mean()) ** 2).mean().add(norm.eps).sqrt().detach()
    return (x - x.mean()) / deviation * norm.weight + norm.bias


def gradient_times_value(seen, functional, first):
    """v · r_lz: the value of patch z in each head times its gradient, through the class token alone: (L, N)."""
    backbone, prefix = seen.target.backbone, seen.target.backbone.num_prefix_tokens
    token, leaves = seen.inputs[first][0].detach(), []
    for layer in range(first, len(backbone.blocks)):
        block, attention, tokens = backbone.blocks[layer], seen.attention[layer].detach(), seen.inputs[layer].detach()
        attn, heads, width = block.attn, block.attn.num_heads, tokens.shape[-1]
        weight, bias = attn.qkv.weight[2 * width :], attn.qkv.bias[2 * width :]
        values = [slow.normalise_tokens(block.norm1, each) @ weight.T + bias for each in tokens]
        leaves.append([each.detach().clone().requires_grad_() for each in values[prefix:]])
        constant = [each.detach() for each in values[:prefix]]
        moved = [
            sum(attention[h, 0, j] * each.chunk(heads)[h] for j, each in enumerate([*constant, *leaves[-1]]))
            for h in range(heads)
        ]
        token = token + slow.scale_of(block, 1) * (torch.cat(moved) @ attn.proj.weight.T + attn.proj.bias)
        token = token + slow.scale_of(block, 2) * block.mlp(frozen(block.norm2, token))
    embedding = frozen(backbone.fc_norm, frozen(backbone.norm, token))
    torch.testing.assert_close(embedding, seen.embedding)
    gradients = torch.autograd.grad(embedding @ functional, [leaf for of_layer in leaves for leaf in of_layer])
    found = [(g * leaf).sum() for g, leaf in zip(gradients, sum(leaves, []), strict=True)]
    return torch.stack(found).detach().view(len(leaves), -1)


def flow(seen, paths, first):
    """rel_l of scalars r_lz (L, N): (1 − s_z) rel_z + Σ_z' Ā_z'z s_z' rel_z' + r_lz, from the last block down."""
    prefix, relevance = seen.target.backbone.num_prefix_tokens, [paths[-1]]
    for layer in range(len(seen.inputs) - 2, first - 1, -1):
        tokens, added = seen.inputs[layer][prefix:], (seen.middles[layer] - seen.inputs[layer])[prefix:]
        attention, later, row = seen.attention[layer].mean(0)[prefix:, prefix:], relevance[-1], []
        share = [o.norm() / (x.norm() + o.norm()) for x, o in zip(tokens, added, strict=True)]
        for z in range(len(tokens)):
            own = (1 - share[z]) * later[z] + paths[layer - first, z]
            row.append(own + sum(a[z] * s * r for a, s, r in zip(attention, share, later, strict=True)))
        relevance.append(torch.stack(row))
    return torch.stack(relevance[::-1]).detach()
