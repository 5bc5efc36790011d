"""Direct paths, against sums that are written out for one image, and the embedding that they are parts of."""

import pytest
import references_attention as slow
import torch
from references_attention import agree

from explainers.transformer.direct_paths import direct_paths, record_direct

MODELS = {name: model for name, model in slow.MODELS.items() if name != "distilled"}
MODELS["average_of_normalised"] = ("vit_tiny_patch16_224", {"global_pool": "avg", "fc_norm": False})


@pytest.fixture(params=MODELS)
def model(request, make_target):
    name, arguments = MODELS[request.param]
    return make_target(name, **arguments)


def scale_part(norm, tokens, part):
    """A part of tokens (T, D) after their normalisation, whose standard deviation is theirs, without the bias."""
    if isinstance(norm, torch.nn.Identity):
        return part
    deviation = ((tokens - tokens.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True).add(norm.eps).sqrt()
    return (part - part.mean(-1, keepdim=True)) / deviation * norm.weight


def embed_part(seen, part):
    """What a part (T, D) of the last block's output is of the embedding."""
    backbone, tokens = seen.target.backbone, seen.outputs[-1]
    rows = slow.readers(seen.target, len(tokens))
    mean = sum(scale_part(backbone.norm, tokens, part)[i] for i in rows) / len(rows)
    whole = sum(slow.normalise_tokens(backbone.norm, tokens)[i] for i in rows) / len(rows)
    return scale_part(backbone.fc_norm, whole, mean)


def move_by_attention(seen, layer, token):
    """What the attention of a block moves from one token to all: (T, D)."""
    return sum(
        head[:, token, None] * path[token] for head, path in zip(seen.attention[layer], seen.paths[layer], strict=True)
    )


def find_paths(target, images, blocks):
    with record_direct(target, blocks) as record:
        target.embed(target.normalise(images))
    return direct_paths(target, record)


def test_each_path_is_what_attention_moves_from_the_patch(model, images):
    model = model.double()
    with slow.in_double(), torch.no_grad():
        found = find_paths(model, images, [0, 1])
        seen, prefix = slow.walk(model, model.normalise(images)[1]), model.backbone.num_prefix_tokens
        wanted = [[embed_part(seen, move_by_attention(seen, layer, prefix + z)) for z in range(16)] for layer in (0, 1)]
        agree(found[1], torch.stack([torch.stack(row) for row in wanted]), 1e-10)


def test_paths_are_parts_of_the_embedding(model, images):
    """With all that other tokens, biases and MLPs add to the output tokens, they sum to the embedding."""
    model = model.double()
    with slow.in_double(), torch.no_grad():
        found = find_paths(model, images[:1], range(len(model.backbone.blocks)))[0].sum((0, 1))
        seen, prefix = slow.walk(model, model.normalise(images)[0]), model.backbone.num_prefix_tokens
        rest = seen.inputs[0]
        for layer, (start, middle, output) in enumerate(zip(seen.inputs, seen.middles, seen.outputs, strict=True)):
            rest = rest + output - middle + seen.biases[layer]
            rest = rest + sum(
                (move_by_attention(seen, layer, token) for token in range(prefix)), torch.zeros_like(start)
            )
        norms = (model.backbone.norm, model.backbone.fc_norm)
        bias = sum(norm.bias for norm in norms if isinstance(norm, torch.nn.LayerNorm))
        agree(found + embed_part(seen, rest) + bias, seen.embedding, 1e-10)
