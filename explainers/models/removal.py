"""Outputs of the target for images with hidden patches, for every kind of removal."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from explainers.errors import InputError, checks_choices
from explainers.masking import PatchGrid, Removal, apply_in_chunks, map_shape, mask_pixels, visible_pixels
from explainers.models.imputation import impute
from explainers.models.model import TargetModel


def supports_drop(target: TargetModel) -> bool:
    """Whether tokens of hidden patches can leave the sequence of this target (removal `drop`).

    Each token has to be made of its own patch alone. The stems of hybrids and of ViTamin put neighbours into it.
    """
    embed: Any = getattr(target.backbone, "patch_embed", None)
    alone = isinstance(embed, PatchEmbed) and isinstance(embed.proj, nn.Conv2d)
    return (
        isinstance(target.backbone, VisionTransformer | Eva) and alone and embed.proj.kernel_size == embed.proj.stride
    )


@checks_choices
def check_removal(target: TargetModel, removal: Removal) -> None:
    """Raise an InputError unless this target supports `removal`."""
    if removal == "drop" and not supports_drop(target):
        mixed = isinstance(target.backbone, VisionTransformer | Eva)
        reason = "whose stem mixes neighbouring patches" if mixed else "which cannot drop tokens"
        raise InputError(
            f"expected a ViT for removal=drop, got {target.name}, {reason}: take removal=zero or removal=black"
        )


@checks_choices
def masked_outputs(
    target: TargetModel,
    function: Callable[[Tensor], Tensor],
    normalised: Tensor,
    keep: Tensor,
    grid: PatchGrid,
    removal: Removal = "zero",
    chunk_size: int = 256,
) -> Tensor:
    """Apply `function` to the target's embedding of every image under each of its M masks.

    With removal `drop`, all masks in one call of the target have the same number of visible patches. Gradients flow to
    `normalised` and to the weights, unless the caller disables them.

    Args:
        target: the model that embeds the masked images; an InputError if it does not support this removal.
        function: function of embeddings (b, D) → (b, ...), for example `target.classify`.
        normalised: normalised images, (B, C, H, W).
        keep: visible patches, boolean (B, M, N).
        grid: the patches of an image.
        removal: what replaces hidden patches, see `Removal`.
        chunk_size: maximum number b of masked images in one call, which bounds the memory.

    Returns:
        The results of `function`, (B, M, ...).
    """
    check_removal(target, removal)
    fill = -target.mean / target.std if removal == "black" else 0.0

    def compute(images: Tensor, masks: Tensor) -> Tensor:
        if removal == "drop":
            return function(embed_visible(target, images, masks))
        if removal == "noisy_linear":
            return function(target.embed(impute(images, visible_pixels(masks, grid))))
        return function(target.embed(mask_pixels(images, masks, grid, fill)))

    return apply_in_chunks(compute, normalised, keep, chunk_size, by_size=removal == "drop")


@checks_choices
def masked_scores(
    target: TargetModel,
    normalised: Tensor,
    classes: Tensor,
    keep: Tensor,
    grid: PatchGrid,
    removal: Removal = "zero",
    chunk_size: int = 256,
) -> Tensor:
    """Compute the score of one class (B,), such as its probability, of every image under each of its M masks, (B, M).

    The other arguments are those of `masked_outputs`.
    """

    def score(embeddings: Tensor) -> Tensor:
        return target.scores(target.classify(embeddings))

    scores = masked_outputs(target, score, normalised, keep, grid, removal, chunk_size)
    return scores.take_along_dim(classes[:, None, None], -1)[..., 0]


def embed_visible(target: TargetModel, normalised: Tensor, keep: Tensor) -> Tensor:
    """Embed images from the tokens of their visible patches alone; each token keeps its position embedding.

    Hidden tokens leave the sequence after the position embedding. Prefix tokens (class, distillation, registers) always
    stay. If no patch is visible and the pooling reads patches alone, the mean image is embedded, as with `zero`.

    Args:
        target: a model for which `check_removal` accepts `drop`.
        normalised: normalised images, (b, C, H, W).
        keep: visible patches, boolean (b, N), as many in every row. A patch is one of the model's, or a square of them.

    Returns:
        The embeddings, (b, D).
    """
    if not keep[0].any() and not _pools_prefix(target.backbone):
        return target.embed(torch.zeros_like(normalised))
    with _drop_hidden_tokens(target, keep.unflatten(-1, map_shape(keep.shape[-1], normalised.shape[-2:]))):
        return target.embed(normalised)


def _pools_prefix(backbone: Any) -> bool:
    """Whether the model can embed an image without patches: it has prefix tokens, and the pooling reads them."""
    reads = backbone.global_pool == "token" or getattr(backbone, "pool_include_prefix", False)
    return backbone.num_prefix_tokens > 0 and (reads or isinstance(backbone, Eva) and backbone.attn_pool is not None)


@contextmanager
def _drop_hidden_tokens(target: TargetModel, keep: Tensor) -> Iterator[None]:
    """Inside this context, only prefix tokens and the tokens of visible patches enter the blocks of a timm model.

    timm calls `patch_drop` after the position embedding. An instance attribute hides the submodule of that name without
    changing it. Eva applies the returned indices to its rotary embeddings.
    """
    prefix, attributes = target.backbone.num_prefix_tokens, vars(target.backbone)

    def drop(tokens: Tensor) -> Any:
        visible = _expand_to_tokens(target, keep, tokens.shape[1] - prefix)
        index = visible.nonzero()[:, 1].view(len(keep), int(visible[0].sum()))
        first = torch.arange(prefix, device=index.device).expand(len(keep), -1)
        kept = tokens.take_along_dim(torch.cat([first, prefix + index], 1)[..., None], 1)
        return (kept, index) if isinstance(target.backbone, Eva) else kept

    before = {key: attributes[key] for key in ("patch_drop",) if key in attributes}
    attributes["patch_drop"] = drop
    try:
        yield
    finally:
        del attributes["patch_drop"]
        attributes.update(before)


def _expand_to_tokens(target: TargetModel, keep: Tensor, tokens: int) -> Tensor:
    """Convert masks of patches (b, rows, columns) to masks of the target's patch tokens, (b, tokens)."""
    rows, columns = keep.shape[1:]
    finer = math.isqrt(tokens // (rows * columns))
    if rows * columns * finer**2 != tokens:
        raise InputError(
            f"expected a grid whose patches consist of those of {target.name}, which has {tokens} patch tokens, got"
            f" {rows} × {columns} patches: take the model's patch_size, or a multiple of it"
        )
    return keep.repeat_interleave(finer, -1).repeat_interleave(finer, -2).flatten(1)
