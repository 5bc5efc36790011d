"""Methods that look inside a ViT, one image at a time, on a timm VisionTransformer that is walked by hand.

`x` are the tokens (T, D) that enter block `layer` of one image, `v` (D,) the functional v · e of the embedding that is
explained; each method gives its map of the patches, (rows, columns). `references_relevance` has those that propagate.
"""

import math
from types import SimpleNamespace

import torch
from torch import nn


def entering(target, image):
    """The tokens that enter the first block: prefix tokens, patches and their positions."""
    backbone = target.backbone
    patches = backbone.patch_embed(target.normalise(image[None]))[0]
    tokens = [getattr(backbone, name, None) for name in ("cls_token", "dist_token", "reg_token")]
    prefix = [token[0] for token in tokens if token is not None]
    positions = backbone.pos_embed[0]
    if backbone.no_embed_class:
        return torch.cat([*prefix, patches + positions]).detach()
    return (torch.cat([*prefix, patches]) + positions).detach()


def walk(target, x, layer=0, bias=lambda module, like: module.bias, frozen=False):
    """All values from block `layer` to the embedding e: a list of what is in each block, and what is after the last.

    Frozen, attention weights, standard deviations and GELU(h) / h are constants. `bias` gives a module's bias, for
    outputs like the tensor that it gets.
    """
    constant = torch.detach if frozen else lambda value: value

    def norm(module, x):
        if isinstance(module, nn.Identity):
            return x
        centred = x - x.mean(-1, keepdim=True)
        deviation = ((centred**2).mean(-1, keepdim=True) + module.eps).sqrt()
        return centred / constant(deviation) * module.weight + bias(module, centred)

    def linear(module, x):
        y = x @ module.weight.T
        return y + bias(module, y)

    blocks = []
    for block in target.backbone.blocks[layer:]:
        at = SimpleNamespace(x=x, module=block)
        heads, width = block.attn.num_heads, x.shape[1]
        at.normed = norm(block.norm1, x)
        at.qkv = linear(block.attn.qkv, at.normed)
        at.scores, at.weights, outputs = [], [], []
        for head in range(heads):
            q, k, v = (part[:, slices(head, width // heads)] for part in at.qkv.split(width, 1))
            at.scores.append(q @ k.T / math.sqrt(width // heads))
            at.weights.append(constant(at.scores[-1].softmax(1)))
            outputs.append(at.weights[-1] @ v)
        at.heads = torch.cat(outputs, 1)
        at.projected = linear(block.attn.proj, at.heads)
        at.attended = at.projected * getattr(block.ls1, "gamma", 1)
        at.middle = x + at.attended
        at.normed_middle = norm(block.norm2, at.middle)
        at.hidden = linear(block.mlp.fc1, at.normed_middle)
        at.active = at.hidden * constant(0.5 * (1 + torch.erf(at.hidden / math.sqrt(2))))
        at.contracted = linear(block.mlp.fc2, at.active)
        at.updated = at.contracted * getattr(block.ls2, "gamma", 1)
        x = at.middle + at.updated
        blocks.append(at)
    end = SimpleNamespace(x=x, normed=norm(target.backbone.norm, x))
    end.pooled = read(target, end.normed)
    end.embedding = end.pooled if target.distilled else norm(target.backbone.fc_norm, end.pooled)
    return blocks, end


def slices(head, width):
    return slice(head * width, (head + 1) * width)


def read(target, tokens):
    """What the head reads of the last tokens: the class token, it and the distillation token, or the mean patch."""
    if target.distilled:
        return torch.cat([tokens[0], tokens[1]])
    return tokens[target.backbone.num_prefix_tokens :].mean(0) if target.backbone.global_pool == "avg" else tokens[0]


def on_grid(target, scores):
    patches = scores[target.backbone.num_prefix_tokens :].detach()
    side = math.isqrt(len(patches))
    return torch.stack([patches[row * side : (row + 1) * side] for row in range(side)])


# SkipPLUS: Equations 3, 4, 5 and 6


def plus(target, x, v, method, first=0):
    """Σ_l A(f_l)(x_l), l ≥ `first`: the method is run on the network from block l, with what enters block l."""
    inputs = [block.x.detach() for block in walk(target, x)[0]]
    return sum(method(target, inputs[layer], layer, v) for layer in range(first, len(inputs)))


def full_grad_plus(target, x, v, first=0, frozen=False):
    inputs = [block.x.detach() for block in walk(target, x)[0]]
    total = sum(input_x_gradient(target, inputs[layer], layer, v, frozen) for layer in range(first, len(inputs)))
    return total + bias_scores(target, inputs[first], first, v, frozen)[0]


# Gradients


def compute_gradient(target, x, layer, v, frozen=False):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(walk(target, x, layer, frozen=frozen)[1].embedding @ v, x)[0]


def input_x_gradient(target, x, layer, v, frozen=False):
    """Equation 1."""
    return on_grid(target, (x * compute_gradient(target, x, layer, v, frozen)).sum(1))


def token_gradient(target, x, layer, v):
    return on_grid(target, (compute_gradient(target, x, layer, v) ** 2).sum(1).sqrt())


def grad_cam(target, x, layer, v):
    gradient = compute_gradient(target, x, layer, v)
    weights = [sum(gradient[:, channel]) / len(x) for channel in range(x.shape[1])]
    return on_grid(target, sum(weight * x[:, channel] for channel, weight in enumerate(weights)))


def x_grad_cam(target, x, layer, v, sized=lambda x: x):
    gradient = compute_gradient(target, x, layer, v)
    weights = []
    for channel in range(x.shape[1]):
        size = sized(x[:, channel])
        weights.append((size * gradient[:, channel]).sum() / (size.sum() + 1e-7))
    return on_grid(target, sum(weight * x[:, channel] for channel, weight in enumerate(weights)))


def grad_cam_plus_plus(target, x, layer, v):
    """The derivatives of Y = exp(s) are exp(s) g, exp(s) g² and exp(s) g³; the weights lack the factor exp(s)."""
    gradient, scores = compute_gradient(target, x, layer, v), torch.zeros(len(x), dtype=x.dtype)
    for channel in range(x.shape[1]):
        g = gradient[:, channel]
        alpha = torch.where(g == 0, 0, g**2 / (2 * g**2 + x[:, channel].abs().sum() * g**3))
        scores = scores + (alpha * g.clamp(min=0)).sum() * x[:, channel]
    return on_grid(target, scores)


def element_wise_cam(target, x, layer, v):
    return on_grid(target, (x * compute_gradient(target, x, layer, v)).clamp(min=0).sum(1))


def layer_cam(target, x, layer, v):
    return on_grid(target, (x * compute_gradient(target, x, layer, v).clamp(min=0)).sum(1))


def att_ixg(target, x, layer, v):
    """Input × Gradient, times AttnFrom (SkipPLUS, Section 3.4): the mean over heads and rows of a token's column."""
    weights = walk(target, x, layer)[0][0].weights
    seen = sum(weight[row] for weight in weights for row in range(len(x))) / (len(weights) * len(x))
    return input_x_gradient(target, x, layer, v) * on_grid(target, seen)


def gen_att(target, x, layer, v, of_head=lambda a, g: (a * g).clamp(min=0)):
    """The row that is read of E_h[(A ⊙ ∂y/∂A)⁺], or the mean of another function of A and its gradient."""
    blocks, end = walk(target, x.clone().requires_grad_(), layer)
    weights = blocks[0].weights
    gradients = torch.autograd.grad(end.embedding @ v, weights)
    matrix = sum(of_head(a, g) for a, g in zip(weights, gradients, strict=True)) / len(weights)
    prefix = target.backbone.num_prefix_tokens
    if target.distilled:
        return on_grid(target, (matrix[0] + matrix[1]) / 2)
    return on_grid(target, matrix[prefix:].mean(0) if target.backbone.global_pool == "avg" else matrix[0])


def attention_gradient(target, x, layer, v):
    return gen_att(target, x, layer, v, lambda a, g: g)


def bias_scores(target, x, layer, v, frozen=False):
    """IxG(f_b)(b), each bias its own tensor at each token: the map of all from block `layer` on, and their sum."""
    taps = []

    def bias(module, like):
        taps.append(module.bias.detach().expand_as(like).clone().requires_grad_())
        return taps[-1]

    score = walk(target, x, layer, bias, frozen)[1].embedding @ v
    score = score + 0 * sum(tap.sum() for tap in taps)  # biases of unread tokens have a gradient, 0
    scores = [(tap * g).sum(-1) for tap, g in zip(taps, torch.autograd.grad(score, taps), strict=True)]
    return sum(on_grid(target, score) for score in scores if score.dim()), sum(score.sum() for score in scores)


def full_grad(target, x, layer, v, frozen=False):
    return input_x_gradient(target, x, layer, v, frozen) + bias_scores(target, x, layer, v, frozen)[0]


# DecompX: a[i, j] is what source j gives to token i; the last source is the biases


def decompose(target, x, layer):
    """The parts of the tokens after each block, a list of (T, T + 1, D), and the parts of the embedding (T + 1, D)."""

    def norm(module, parts):
        if isinstance(module, nn.Identity):
            return parts
        deviation = (parts.sum(-2).var(-1, correction=0) + module.eps).sqrt()
        parts = module.weight * (parts - parts.mean(-1, keepdim=True)) / deviation[..., None, None]
        return with_bias(module, parts)

    def linear(module, parts):
        return with_bias(module, parts @ module.weight.T)

    def with_bias(module, parts):
        parts = parts.clone()
        parts[..., -1, :] += module.bias
        return parts

    parts = torch.zeros(len(x), len(x) + 1, x.shape[1], dtype=x.dtype)
    for token in range(len(x)):
        parts[token, token] = x[token]
    states = []
    for block, at in zip(target.backbone.blocks[layer:], walk(target, x, layer)[0], strict=True):
        values = linear(block.attn.qkv, norm(block.norm1, parts))[..., -x.shape[1] :]
        mixed, width = torch.zeros_like(values), x.shape[1] // len(at.weights)
        for head, weights in enumerate(at.weights):
            for to in range(len(x)):
                of_head = values[:, :, slices(head, width)]
                mixed[to, :, slices(head, width)] = (weights[to][:, None, None] * of_head).sum(0)
        parts = parts + linear(block.attn.proj, mixed) * getattr(block.ls1, "gamma", 1)
        hidden = linear(block.mlp.fc1, norm(block.norm2, parts))
        total = hidden.sum(1, keepdim=True)
        active = hidden * nn.functional.gelu(total) / total
        parts = parts + linear(block.mlp.fc2, active) * getattr(block.ls2, "gamma", 1)
        states.append(parts.detach())
    pooled = read(target, norm(target.backbone.norm, parts))
    if target.distilled:  # `read` puts the sources of the two tokens behind one another
        return states, torch.cat(pooled.chunk(2), 1).detach()
    return states, norm(target.backbone.fc_norm, pooled).detach()


def decompx(target, x, layer, v):
    return on_grid(target, (decompose(target, x, layer)[1] @ v)[:-1])


# What is explained


def in_double(target):
    """The target with a backbone in double precision; its head always computes in single precision."""
    target.double().head.float()
    return target


def of_class(target, label):
    """The row of a class in the head: v of its logit, without the head's bias."""
    if target.distilled:
        return torch.cat([target.head.head.weight[label], target.head.head_dist.weight[label]]).detach() / 2
    return target.head.weight[label].detach()


def maps(target, images, labels, layer, method):
    """A method's maps (B, rows, columns) of the classes of uint8 images, from block `layer` on."""
    found = []
    for image, label in zip(images, labels.tolist(), strict=True):
        x = walk(target, entering(target, image))[0][layer].x.detach()
        found.append(method(target, x, layer, of_class(target, label).double()))
    return torch.stack(found)


def sums(target, images, labels, first, method):
    """Σ_l A(f_l)(x_l) of the classes of uint8 images, l ≥ `first`: (B, rows, columns)."""
    pairs = zip(images, labels.tolist(), strict=True)
    return torch.stack(
        [plus(target, entering(target, x), of_class(target, label).double(), method, first) for x, label in pairs]
    )
