"""CAAP: activations of single patches, pasted into the forward pass of a neutral image."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explainers.errors import InputError, UnsupportedModel, check_positive
from explainers.masking import PatchGrid, neighbourhoods
from explainers.models import TargetModel
from explainers.models.inputs import validate_classes
from explainers.posthoc.white_box import FunctionalMethod, Output, class_scores
from explainers.runtime.progress import advance
from explainers.transformer.blocks import find_blocks, layer_index, num_prefix_tokens


@contextmanager
def record_inputs(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Record the tokens (B, T, D) that enter each of these blocks during one forward pass inside this context."""
    tokens: list[Tensor] = []
    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(lambda _, args: tokens.append(args[0])).remove)
        yield tokens


@contextmanager
def paste_tokens(
    blocks: Sequence[nn.Module], first: int, neutral: Tensor, sources: Sequence[Callable[[], Tensor]], which: Tensor
) -> Iterator[None]:
    """Inside this context, a forward pass starts at block `first`, and some of its tokens are those of other passes.

    Args:
        blocks: all blocks of the model. Those before `first` are left out: they return what they get.
        first: index of the block that gets the `neutral` tokens.
        neutral: tokens that enter block `first`, (1, T, D).
        sources: for block `first` and each one after it that is patched, a function that returns tokens (n, T, D).
        which: which tokens enter these blocks as in `sources`, boolean (n, T).
    """

    def paste(number: int, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        own = args[0] if number else neutral
        return torch.where(which[..., None], sources[number](), own), *args[1:]

    with ExitStack() as stack:
        for block in blocks[:first]:
            stack.enter_context(patch.object(block, "forward", lambda tokens, *_, **__: tokens))
        for number, block in enumerate(blocks[first : first + len(sources)]):
            stack.callback(block.register_forward_pre_hook(partial(paste, number)).remove)
        yield


class CAAP(FunctionalMethod):
    """Causal Attribution via Activation Patching (Izadi et al., 2026, arXiv 2603.13652).

    The score of patch z is s(z) − s(∅). Here s(z) is the score of the class in a forward pass of a neutral image, in
    which the token of z enters each of the blocks `first` ... `last` as it does in the pass of the explained image, and
    s(∅) is the score of the neutral image, which changes no order. All other tokens, also the class token, react.

    Only the abstract of the paper was at hand. This is its plain reading: the residual stream of one token is replaced,
    the neutral image is the mean pixel, and "intermediate layers" are the second and third quarter of the blocks.

    The neutral image and the explained one are computed once. The N passes of the patches start at block `first`, so
    that of L blocks each computes L − `first`: ¾ of a pass by default, 147 full passes for 196 patches. One call
    explains all functionals from the same passes.

    Args:
        first: index of the first block whose input is patched; negative from the last; `None` for ⌊L / 4⌋.
        last: index of the last such block; `None` for ⌊3 L / 4⌋ − 1.
        hops: patch all tokens at most so many steps away from z together; 0 for z alone.
        chunk_size: maximum number of patched passes in memory.
    """

    linear = True

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        output: Output = "logit",
        first: int | None = None,
        last: int | None = None,
        hops: int = 0,
        chunk_size: int = 256,
    ) -> None:
        super().__init__(target, grid, output)
        check_positive(chunk_size=chunk_size)
        count = len(find_blocks(target))
        if not hasattr(target.backbone, "blocks"):
            raise UnsupportedModel(
                "a model with global attention",
                f"{target.name}, whose patches do not keep their tokens",
                "a ViT, or a method for any model, such as Occlusion",
            )
        self.first = count // 4 if first is None else layer_index(target, first)
        self.last = max(3 * count // 4 - 1, self.first) if last is None else layer_index(target, last)
        if self.last < self.first:
            raise InputError(f"last={last} is before the first patched block, {self.first}: take first <= last")
        self.hops = hops
        self.chunk_size = chunk_size
        own = PatchGrid(grid.size, target.patch_size or grid.patch_size)
        self.forward_passes = own.num_patches + 1
        self.register_buffer("near", neighbourhoods(own, hops), persistent=False)
        self.near: Tensor

    @torch.no_grad()
    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain one class (B,) of each uint8 image (B, C, H, W) by its exact score: (B, rows, columns)."""
        wanted = validate_classes(classes, images, self.target.num_classes)
        _, neutral, patched = self.embed_patched(images)
        embeddings = torch.cat([neutral.expand(len(images), 1, -1), patched], 1)  # (B, 1 + N, D)
        of_each = wanted.repeat_interleave(embeddings.shape[1]).split(self.chunk_size)
        parts = zip(embeddings.flatten(0, 1).split(self.chunk_size), of_each, strict=True)
        found = [class_scores(self.target, self.target.classify(part), own, self.output) for part, own in parts]
        scores = torch.cat(found).view(len(images), -1)
        return self.patches_on_grid(scores[:, None, 1:] - scores[:, None, :1])[:, 0].float()

    @torch.no_grad()
    def explain_all(self, images: Tensor, functionals_of: Callable[[Tensor], Tensor]) -> Tensor:
        embeddings, neutral, patched = self.embed_patched(images)
        changes = (patched - neutral).float()
        return self.patches_on_grid(torch.einsum("bnd,bvd->bvn", changes, functionals_of(embeddings).float()))

    def embed_patched(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embed uint8 images (B, D), the neutral image (1, D), and it with each patch of each image, (B, N, D)."""
        self.grid.check(images)
        normalised, blocks = self.target.normalise(images), find_blocks(self.target)
        blank = torch.zeros_like(normalised[:1])
        with record_inputs(blocks[self.first : self.last + 1]) as tokens:
            embeddings = self.target.embed(torch.cat([blank, normalised]))
        near = F.pad(self.near.to(images.device), (num_prefix_tokens(self.target), 0))  # (N, T)
        parts = []
        for pairs in torch.arange(len(images) * len(near), device=images.device).split(self.chunk_size):
            image = 1 + pairs // len(near)
            sources = [partial(torch.index_select, each, 0, image) for each in tokens]
            with paste_tokens(blocks, self.first, tokens[0][:1], sources, near[pairs % len(near)]):
                parts.append(self.target.embed(blank.expand(len(pairs), -1, -1, -1)))
            advance(len(pairs))
        return embeddings[1:], embeddings[:1], torch.cat(parts).unflatten(0, (len(images), len(near)))
