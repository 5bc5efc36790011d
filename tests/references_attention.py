"""Methods that read attention, written out for one image in double precision, with all matrices and vectors kept.

`walk` runs a timm transformer by hand. Each attention matrix gets a zero added, which is a leaf: the gradient at the
zero is the gradient at the matrix.
"""

import contextlib
import copy
import math
from types import SimpleNamespace

import torch
from references_propagation import entering, of_class
from references_relevance import relevance as propagate

EVA = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
MODELS = {
    "vit": ("vit_tiny_patch16_224", {"depth": 3}),
    "layer_scale": ("vit_tiny_patch16_224", {"init_values": 0.7}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "average": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "registers": ("vit_tiny_patch16_224", {"reg_tokens": 2}),
    "eva": ("eva02_small_patch14_224", EVA),
}
SWIN = "swin_tiny_patch4_window7_224", {"img_size": 32, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2)}


@contextlib.contextmanager
def in_double():
    """Everything in double precision, also what the library would round to single precision."""
    rounds, torch.Tensor.float = torch.Tensor.float, torch.Tensor.double
    torch.set_default_dtype(torch.double)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float)
        torch.Tensor.float = rounds


def normalise_tokens(layer, x):
    """LayerNorm of tokens (T, D), or of one vector."""
    if isinstance(layer, torch.nn.Identity):
        return x
    variance = ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / (variance + layer.eps).sqrt() * layer.weight + layer.bias


def rotated(x, rope, prefix):
    """Rotary positions of (A, T, d): pairs of neighbouring channels turn, and the prefix tokens stay."""
    sine, cosine = rope.chunk(2, -1)
    patches = x[:, prefix:]
    turned = torch.stack([-patches[..., 1::2], patches[..., ::2]], -1).flatten(-2)
    return torch.cat([x[:, :prefix], patches * cosine + turned * sine], 1)


def scale_of(block, number):
    """LayerScale of the attention (1) or the MLP (2) of a block."""
    if hasattr(block, "ls1"):
        return getattr(getattr(block, f"ls{number}"), "gamma", 1.0)
    gamma = getattr(block, f"gamma_{number}")
    return 1.0 if gamma is None else gamma


def readers(target, tokens):
    """The tokens whose outputs are the embedding."""
    if target.distilled:
        return [0, 1]
    if target.backbone.global_pool == "token":
        return [0]
    return list(range(target.backbone.num_prefix_tokens, tokens))


def embedding_of(target, tokens):
    """What the head reads of the output (T, D) of any block."""
    tokens = normalise_tokens(target.backbone.norm, tokens)
    if target.distilled:
        return torch.cat([tokens[0], tokens[1]])
    mean = sum(tokens[i] for i in readers(target, len(tokens))) / len(readers(target, len(tokens)))
    return normalise_tokens(target.backbone.fc_norm, mean)


def logits_of(target, embedding):
    if target.distilled:
        first, second = embedding.chunk(2)
        return (target.head.head(first) + target.head.head_dist(second)) / 2
    return target.head(embedding)


def walk(target, image):
    """Run a model in double precision on a normalised image (C, H, W) and keep everything."""
    target = copy.deepcopy(target).double()
    backbone, rope = target.backbone, None
    tokens = backbone._pos_embed(backbone.patch_embed(image.double()[None]))
    if isinstance(tokens, tuple):
        tokens, rope = tokens
    x = backbone.norm_pre(tokens)[0]
    seen = SimpleNamespace(
        target=target, inputs=[], middles=[], outputs=[], attention=[], leaves=[], paths=[], biases=[]
    )
    seen.queries, seen.keys, seen.values, seen.mixed = [], [], [], []
    for block in backbone.blocks:
        attn, heads = block.attn, block.attn.num_heads
        seen.inputs.append(x)
        bias = attn.qkv.bias if attn.qkv.bias is not None else torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
        qkv = normalise_tokens(block.norm1, x) @ attn.qkv.weight.T + bias
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in qkv.chunk(3, -1))
        if rope is not None:
            q, k = rotated(q, rope, backbone.num_prefix_tokens), rotated(k, rope, backbone.num_prefix_tokens)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        leaf = torch.zeros_like(weights, requires_grad=True)
        weights = weights + leaf
        heads_out = torch.cat(list(weights @ v), -1)
        for kept, heads_of in ((seen.queries, q), (seen.keys, k), (seen.values, v)):
            kept.append(torch.cat(list(heads_of), -1).detach())
        seen.mixed.append(heads_out)
        x = x + scale_of(block, 1) * (heads_out @ attn.proj.weight.T + attn.proj.bias)
        seen.middles.append(x)
        x = x + scale_of(block, 2) * block.mlp(normalise_tokens(block.norm2, x))
        seen.outputs.append(x)
        seen.attention.append(weights)
        seen.leaves.append(leaf)
        columns = attn.proj.weight.chunk(heads, 1)
        seen.paths.append(torch.stack([scale_of(block, 1) * (v[h] @ columns[h].T) for h in range(heads)]).detach())
        seen.biases.append((scale_of(block, 1) * attn.proj.bias).detach())
    seen.embedding = embedding_of(target, x)
    seen.logits = logits_of(target, seen.embedding)
    return seen


def gradients(seen, label):
    """∂y/∂A of every layer, (A, T, T) each."""
    return torch.autograd.grad(seen.logits[label], seen.leaves, retain_graph=True)


def agree(found, wanted, tolerance):
    """The largest difference, in units of the largest value."""
    assert found.shape == wanted.shape and wanted.abs().max() > 0
    error = ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()
    assert error < tolerance, error


def on_patches(seen, matrix):
    """The mean of the rows of a matrix (T, T) that the head reads, at the patches: (rows, columns)."""
    rows = readers(seen.target, len(matrix))
    scores = (sum(matrix[i] for i in rows) / len(rows)).detach()[seen.target.backbone.num_prefix_tokens :]
    return scores.reshape(math.isqrt(len(scores)), -1)


def product(matrices, start=None):
    """The last matrix times the one before ... times the first (times `start`)."""
    result = torch.eye(len(matrices[0]), dtype=torch.double) if start is None else start
    for matrix in matrices:
        result = matrix @ result
    return result


def raw_attention(seen):
    return on_patches(seen, seen.attention[-1].mean(0))


def attention_rollout(seen):
    """Abnar & Zuidema (2020): Ã = (Ā + I) / 2."""
    return on_patches(seen, product([(each.mean(0) + torch.eye(each.shape[-1])) / 2 for each in seen.attention]))


def attention_grad_cam(seen, label, relu=True):
    """The class token's row: heads weighted by their mean gradient over the patches; positive part of the mean."""
    prefix, weights, gradient = seen.target.backbone.num_prefix_tokens, seen.attention[-1], gradients(seen, label)[-1]
    result = torch.zeros_like(weights[0])
    for i in range(len(result)):
        for h in range(len(weights)):
            result[i] += weights[h, i] * gradient[h, i, prefix:].mean() / len(weights)
    return on_patches(seen, result.clamp(min=0) if relu else result)


def gen_att(seen, label):
    """E_h[(∇A ⊙ A)⁺] of every layer (Chefer et al., ICCV 2021, Equation 5)."""
    return [
        (a * gradient).clamp(min=0).mean(0) for a, gradient in zip(seen.attention, gradients(seen, label), strict=True)
    ]


def gae(seen, label):
    """R = I, then R ← R + Ā R in each layer (Equation 6)."""
    relevance = torch.eye(len(seen.inputs[0]), dtype=torch.double)
    for matrix in gen_att(seen, label):
        relevance = relevance + matrix @ relevance
    return on_patches(seen, relevance)


def grad_sam(seen, label):
    """Barkan et al. (2021): Σ over layers of the mean over heads of A ⊙ ReLU(∂y/∂A), for the row that is read."""
    total = torch.zeros(len(seen.inputs[0]), len(seen.inputs[0]))
    for weights, gradient in zip(seen.attention, gradients(seen, label), strict=True):
        for h in range(len(weights)):
            total = total + weights[h] * gradient[h].clamp(min=0) / len(weights)
    return on_patches(seen, total)


def transformer_attribution(seen, label, relevance, start=0):
    """C = Ā_start · ... · Ā_L with Ā = I + E_h[(∇A ⊙ R_A)⁺] (Chefer et al., CVPR 2021, Equations 13 and 14)."""
    pairs = list(zip(gradients(seen, label), relevance, strict=True))[start:]
    return on_patches(seen, product([torch.eye(r.shape[-1]) + (g * r).clamp(min=0).mean(0) for g, r in pairs]))


def partial_lrp(seen, relevance):
    return on_patches(seen, relevance[-1].clamp(min=0).mean(0))


def tam(target, image, label, steps):
    """Yuan et al. (2021): the chain from the last layer to the first, times the last layer's integrated gradient."""
    seen = walk(target, image)
    state = seen.attention[-1].mean(0)
    for weights in reversed(seen.attention[:-1]):
        state = state @ weights.mean(0) + state
    integral = 0
    for step in range(steps):
        integral = integral + gradients(walk(target, image * step / (steps - 1)), label)[-1] / steps
    rows, integral = readers(target, len(state)), integral.clamp(min=0).mean(0)
    both = (sum(state[i] for i in rows) / len(rows)) * (sum(integral[i] for i in rows) / len(rows))
    return on_patches(seen, both.expand(len(state), -1))


def le_grad(seen, label):
    """Bousselham et al. (2024): layer l's own score, and its gradient at the attention of layer l alone."""
    total = 0
    for output, leaf in zip(seen.outputs, seen.leaves, strict=True):
        score = logits_of(seen.target, embedding_of(seen.target, output))[label]
        gradient = torch.autograd.grad(score, leaf, retain_graph=True)[0].clamp(min=0)
        total = total + gradient.sum((0, 1)) / (gradient.shape[0] * gradient.shape[1]) / len(seen.outputs)
    return on_patches(seen, total.expand(len(total), -1))


def added_by_attention(seen, layer):
    """What attention alone carries from token j to token i, (T, T, D)."""
    weights, paths = seen.attention[layer].detach(), seen.paths[layer]
    columns = []
    for j in range(paths.shape[1]):
        columns.append(sum(weights[h, :, j, None] * paths[h, j] for h in range(len(weights))))
    return torch.stack(columns, 1)


def parts(seen, layer):
    """T_i(x_j): what token j adds to token i in attention and skip connection, (T, T, D)."""
    result = added_by_attention(seen, layer)
    for i, x in enumerate(seen.inputs[layer].detach()):
        result[i, i] += x
    return result


def att_in(seen, layer):
    """Norms of what attention alone carries from token j to token i, head by head (Kobayashi et al., 2020)."""
    return added_by_attention(seen, layer).norm(dim=-1)


def glob_enc(seen, layer):
    """Norms of the parts after the second LayerNorm of their sum, rows normalised (SkipPLUS, Section E.2)."""
    norm, middle = seen.target.backbone.blocks[layer].norm2, seen.middles[layer].detach()
    spread = (middle.var(-1, unbiased=False) + norm.eps).sqrt()
    shares = [
        (part - part.mean(-1, keepdim=True)) / spread[i] * norm.weight for i, part in enumerate(parts(seen, layer))
    ]
    norms = (torch.stack(shares) ** 2).sum(-1).sqrt()
    return norms / norms.sum(1, keepdim=True)


def alti(seen, layer, total):
    """Ferrando et al. (2022), Equations 8 and 9; `total` y, (T, D)."""
    distance = (total[:, None] - parts(seen, layer)).abs().sum(-1)
    result = (total.abs().sum(-1, keepdim=True) - distance).clamp(min=0)
    return result / result.sum(1, keepdim=True)


def token_weights(before, after, scale, measured="both"):
    """L(Ẽ_i) / L(E_i) · NECC_i of each token, or one of the two factors."""
    lengths, angles = [], []
    for e, changed in zip(before.detach(), after.detach(), strict=True):
        norms = (e**2).sum().sqrt(), (changed**2).sum().sqrt()
        lengths.append(norms[1] / norms[0])
        angles.append(((e * changed).sum() / (norms[0] * norms[1])).exp())
    divisor = sum(angles) if scale == "softmax" else sum(angles) / len(angles)
    if measured == "length":
        return torch.stack(lengths)
    if measured == "direction":
        return torch.stack([angle / divisor for angle in angles])
    return torch.stack([length * angle / divisor for length, angle in zip(lengths, angles, strict=True)])


def token_tm(
    seen,
    label,
    transformed="values",
    scale="mean",
    heads="together",
    mlp=True,
    measured="both",
    weights_of=token_weights,
):
    """C_0 = diag(L(E)), then C ← U_MLP U_attention C in each layer, all matrices written out."""
    contribution = torch.diag((seen.inputs[0] ** 2).sum(-1).sqrt())
    identity = torch.eye(len(contribution))
    for layer, gradient in enumerate(gradients(seen, label)):
        before, middle, output = seen.inputs[layer], seen.middles[layer], seen.outputs[layer]
        if transformed == "values":
            w_attention = weights_of(before, sum(seen.paths[layer]), scale, measured)
            w_mlp = weights_of(middle, output - middle, scale, measured)
        else:
            w_attention = weights_of(before, middle, scale, measured)
            w_mlp = weights_of(middle, output, scale, measured)
        weights = seen.attention[layer]
        if heads == "together":
            mixed = (weights * gradient).clamp(min=0).mean(0) @ torch.diag(w_attention)
        else:
            mixed = (weights.mean(0) @ torch.diag(w_attention)) * gradient.clamp(min=0).mean(0)
        contribution = (identity + mixed) @ contribution
        if mlp:
            contribution = (identity + torch.diag(w_mlp)) @ contribution
    return on_patches(seen, contribution)


def lrp_of_attention(target, image, label):
    """R_A of every layer of a ViT, (A, T, T) each, by the rules of Transformer Attribution, of a uint8 image."""
    tokens, functional = entering(target, image), of_class(target, label).double()
    heads = propagate(target, tokens, 0, functional, positive=True, residual="conserved")[1]
    return [torch.stack(of_layer).detach() for of_layer in heads]
