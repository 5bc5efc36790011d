"""The masked autoencoder (He et al., 2022) on a whole image, one token and one head at a time."""

import math

import torch


def layer_norm(token, weights, name):
    centred = token - token.mean()
    return centred / (centred.square().mean() + 1e-6).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(token, weights, name):
    return weights[f"{name}.weight"] @ token + weights[f"{name}.bias"]


def gelu(numbers):
    return torch.tensor([x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in numbers.tolist()])


def attention(tokens, weights, name, heads):
    """Softmax attention of every token (width,) over all tokens."""
    width = len(tokens[0]) // heads
    mixed = [[] for _ in tokens]
    for head in range(heads):
        rows = slice(head * width, (head + 1) * width)
        query, key, value = (
            [t.view(3, -1)[i][rows] for t in (linear(x, weights, f"{name}.qkv") for x in tokens)] for i in range(3)
        )
        for i, asked in enumerate(query):
            scores = [math.exp(float(asked @ other) / math.sqrt(width)) for other in key]
            mixed[i].append(sum(score / sum(scores) * seen for score, seen in zip(scores, value, strict=True)))
    return [linear(torch.cat(parts), weights, f"{name}.proj") for parts in mixed]


def block(tokens, weights, name, heads):
    """One transformer block with normalisation before attention and before the MLP."""
    mixed = attention([layer_norm(t, weights, f"{name}.norm1") for t in tokens], weights, f"{name}.attn", heads)
    tokens = [t + m for t, m in zip(tokens, mixed, strict=True)]
    hidden = [gelu(linear(layer_norm(t, weights, f"{name}.norm2"), weights, f"{name}.mlp.fc1")) for t in tokens]
    return [t + linear(h, weights, f"{name}.mlp.fc2") for t, h in zip(tokens, hidden, strict=True)]


def reconstruction(weights, image, size, heads, decoder_heads):
    """The decoder's token and the reconstructed pixels of every patch of one normalised image (3, H, W), none masked.

    Args:
        weights: official name → tensor.
        image: the image.
        size: side of a patch, in pixels.
        heads: number of attention heads of the encoder.
        decoder_heads: number of attention heads of the decoder.
    """
    side = image.shape[-1] // size
    tokens = [weights["cls_token"][0, 0] + weights["pos_embed"][0, 0]]
    for row in range(side):
        for column in range(side):
            patch = image[:, row * size : (row + 1) * size, column * size : (column + 1) * size]
            embedded = torch.stack([(kernel * patch).sum() for kernel in weights["patch_embed.proj.weight"]])
            place = weights["pos_embed"][0, 1 + row * side + column]
            tokens.append(embedded + weights["patch_embed.proj.bias"] + place)
    depth, decoder_depth = (
        1 + max(int(name.split(".")[1]) for name in weights if name.startswith(kind))
        for kind in ("blocks.", "decoder_blocks.")
    )
    for i in range(depth):
        tokens = block(tokens, weights, f"blocks.{i}", heads)
    tokens = [linear(layer_norm(t, weights, "norm"), weights, "decoder_embed") for t in tokens]
    tokens = [t + place for t, place in zip(tokens, weights["decoder_pos_embed"][0], strict=True)]
    for i in range(decoder_depth):
        tokens = block(tokens, weights, f"decoder_blocks.{i}", decoder_heads)
    tokens = [layer_norm(t, weights, "decoder_norm") for t in tokens[1:]]
    return torch.stack(tokens), torch.stack([linear(t, weights, "decoder_pred") for t in tokens])
