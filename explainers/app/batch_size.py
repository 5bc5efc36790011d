"""How many images an explainer takes at once."""

from typing import Any

from explainers import Explainer
from explainers.models import TargetModel
from explainers.transformer.blocks import blocks_of, is_transformer, num_prefix_tokens

LARGEST = 16
"""Largest number of images that are explained at once."""

MEMORY = 4 * 2**30
"""Bytes that one batch may take, unless a single image takes more."""

MAPS = 4
"""Copies of the attention maps of each head that a method of attention keeps: weights, scores, gradients, products."""

TOKENS = 25
"""Activations of the width of a token that are kept for its gradient in each block: queries, keys, values, MLP."""


def batch_size_for(explainer: Explainer, target: TargetModel) -> int:
    """Number of images that an explainer takes at once within `MEMORY`; `LARGEST` for models without known blocks."""
    if not is_transformer(target):
        return LARGEST
    blocks: Any = blocks_of(target)
    tokens = target.backbone.patch_embed.num_patches + num_prefix_tokens(target)
    floats = TOKENS * tokens * target.embed_dim
    if getattr(getattr(explainer, "reads", None), "attention", False):
        floats += MAPS * blocks[0].attn.num_heads * tokens**2
    return max(1, min(LARGEST, MEMORY // (4 * len(blocks) * floats)))
