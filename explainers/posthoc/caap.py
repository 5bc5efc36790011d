"""CAAP: activations of single patches, pasted into the forward pass of a neutral image."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from explainers.errors import InputError, UnsupportedModel, check_positive
from explainers.masking import PatchGrid
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
        self.chunk_size = chunk_size
        self.forward_passes = PatchGrid(grid.size, target.patch_size or grid.patch_size).num_patches + 1

    @torch.no_grad()
    def explain_all(self, images: Tensor, functionals_of: Callable[[Tensor], Tensor]) -> Tensor:
        self.grid.check(images)
        normalised, tokens = self.target.normalise(images), list[Tensor]()
        blank, blocks = torch.zeros_like(normalised[:1]), find_blocks(self.target)
        with ExitStack() as stack:
            for block in blocks[self.first : self.last + 1]:
                stack.callback(block.register_forward_pre_hook(lambda _, args: tokens.append(args[0])).remove)
            neutral, embeddings = self.target.embed(torch.cat([blank, normalised])).split([1, len(images)])
        prefix, parts = num_prefix_tokens(self.target), []
        count = tokens[0].shape[1] - prefix
        for pairs in torch.arange(len(images) * count, device=images.device).split(self.chunk_size):
            with paste_tokens(blocks, self.first, tokens, 1 + pairs // count, prefix + pairs % count):
                parts.append(self.target.embed(blank.expand(len(pairs), -1, -1, -1)))
            advance(len(pairs))
        changes = (torch.cat(parts) - neutral).unflatten(0, (len(images), count)).float()
        functionals = functionals_of(embeddings).float()
        return self.patches_on_grid(torch.einsum("bnd,bvd->bvn", changes, functionals))


@contextmanager
def paste_tokens(
    blocks: Sequence[nn.Module], first: int, tokens: Sequence[Tensor], image: Tensor, position: Tensor
) -> Iterator[None]:
    """Inside this context, forward passes start at block `first` with neutral tokens, of which one is of an image.

    Args:
        blocks: all blocks of the model. Those before `first` return what they get.
        first: index of the first block whose input is patched.
        tokens: what enters this block, and each one after it that is patched, in passes of the neutral image, row 0,
            and of others: (1 + B, T, D).
        image: the row of each pass, (n,).
        position: the token that is that of the image, (n,).
    """

    def paste(number: int, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        own = args[0].clone() if number else tokens[0][:1].repeat(len(image), 1, 1)
        own[torch.arange(len(image), device=own.device), position] = tokens[number][image, position].to(own.dtype)
        return own, *args[1:]

    with ExitStack() as stack:
        for block in blocks[:first]:
            stack.enter_context(patch.object(block, "forward", lambda tokens, *_, **__: tokens))
        for number, block in enumerate(blocks[first : first + len(tokens)]):
            stack.callback(block.register_forward_pre_hook(partial(paste, number)).remove)
        yield
