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
from explainers.posthoc.white_box import FunctionalMethod, Output
from explainers.runtime.progress import advance
from explainers.transformer.blocks import find_blocks, layer_index, num_prefix_tokens


class CAAP(FunctionalMethod):
    """Causal Attribution via Activation Patching (Izadi et al., 2026, arXiv 2603.13652).

    The score of patch z is s(z) − s(∅). Here s(z) is the score of the class in a forward pass of a neutral image, in
    which the token of z enters each of the blocks `first` ... `last` as it does in the pass of the explained image, and
    s(∅) is the score of the neutral image, which changes no order. All other tokens, also the class token, react.

    Only the abstract of the paper was at hand. This is its plain reading: the residual stream of one token is replaced,
    the neutral image is the mean pixel, and the intermediate layers are the second and third quarter of the blocks. For
    other scores than the logit of a linear head, s is their linear functional at the explained image.

    The neutral image and the explained one are computed once. Of L blocks, the N passes of the patches compute the last
    L − `first`: ¾ of a pass by default. One call explains all functionals from the same passes.

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
            got = f"{target.name}, whose patches do not keep their tokens"
            raise UnsupportedModel("a model with global attention", got, "a ViT, or a method by masks, as Occlusion")
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
    def explain_all(self, images: Tensor, functionals_of: Callable[[Tensor], Tensor]) -> Tensor:
        self.grid.check(images)
        normalised, tokens = self.target.normalise(images), list[Tensor]()
        blank, blocks = torch.zeros_like(normalised[:1]), find_blocks(self.target)
        with ExitStack() as stack:
            for block in blocks[self.first : self.last + 1]:
                stack.callback(block.register_forward_pre_hook(lambda _, args: tokens.append(args[0])).remove)
            neutral, *embeddings = self.target.embed(torch.cat([blank, normalised])).split([1, len(images)])
        near = F.pad(self.near.to(images.device), (num_prefix_tokens(self.target), 0))  # (N, T)
        parts = []
        for pairs in torch.arange(len(images) * len(near), device=images.device).split(self.chunk_size):
            sources = [partial(torch.index_select, each, 0, 1 + pairs // len(near)) for each in tokens]
            with paste_tokens(blocks, self.first, tokens[0][:1], sources, near[pairs % len(near)]):
                parts.append(self.target.embed(blank.expand(len(pairs), -1, -1, -1)))
            advance(len(pairs))
        changes = (torch.cat(parts) - neutral).unflatten(0, (len(images), len(near))).float()
        functionals = functionals_of(embeddings[0]).float()
        return self.patches_on_grid(torch.einsum("bnd,bvd->bvn", changes, functionals))


@contextmanager
def paste_tokens(
    blocks: Sequence[nn.Module], first: int, neutral: Tensor, sources: Sequence[Callable[[], Tensor]], which: Tensor
) -> Iterator[None]:
    """Inside this context, a forward pass starts at block `first`, and some of its tokens are those of other passes.

    Args:
        blocks: all blocks of the model. Those before `first` return what they get.
        first: index of the block that gets the `neutral` tokens, (1, T, D).
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
