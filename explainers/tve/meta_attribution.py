"""What a backbone sees of every patch neighbourhood, and what that says of any class (TVE, Definitions 1 and 2)."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from explainers.masking import PatchGrid, masked_forward, neighbourhoods
from explainers.sampling import random_patches, stream, uniform
from explainers.target import TargetModel


def meta_attribution(
    embed: Callable[[Tensor], Tensor], images: Tensor, near: Tensor, grid: PatchGrid, chunk_size: int = 256
) -> Tensor:
    """Definition 1: what the backbone G sees of N(z), and of everything else.

    Args:
        embed: G, normalised images (B, C, H, W) → embeddings (B, D).
        images: (B, C, H, W), normalised.
        near: N(z) of Z patches z of each image; boolean, (B, Z, N).

    Returns:
        (B, Z, 2, D): g = G(N(z); x), then h = G(Z(x) \\ N(z); x).
    """
    keep = torch.stack([near, ~near], 2)  # (B, Z, 2, N)
    return masked_forward(embed, images, keep.flatten(1, 2), grid, chunk_size=chunk_size).unflatten(1, (-1, 2))


def transfer(
    head: Callable[[Tensor], Tensor],
    meta: Tensor,
    h_weight: float = 1.0,
    score: Literal["log_probability", "logit"] = "log_probability",
    classes: Tensor | None = None,
) -> Tensor:
    """Definition 2: φ(z) = log H(g; y) − log H(h; y), the attribution of every patch to every class y, or to one.

    Args:
        head: the task's classifier H, embeddings (..., D) → logits (..., K).
        meta: g and h of every patch, (B, N, 2, D).
        h_weight, score: the released code has 0 and `logit`.
        classes: of each image (B,); by default all.

    Returns:
        (B, K, N), or (B, N) of `classes`.
    """
    scores = head(meta).float()  # (B, N, 2, K)
    if score == "log_probability":
        scores = scores.log_softmax(-1)
    scores = scores.permute(0, 3, 1, 2) if classes is None else scores[torch.arange(len(scores)), :, :, classes]
    return scores[..., 0] - h_weight * scores[..., 1]


class MetaAttributions:
    """A source (see `sources`): the meta-attributions of some patches of each image, drawn anew every epoch.

    Rows: `patch` (B, Z), the patches that were drawn, and `meta` (B, Z, 2, D).

    Args:
        hops: the size of N(z); of several sizes, one is drawn for every patch.
        patches: Z. chunk_size: masked images in memory at a time. seed: of the draws.
    """

    provides = ("patch", "meta")

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        hops: Sequence[int] = (2,),
        patches: int = 1,
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        self.target, self.grid, self.hops, self.patches = target, grid, tuple(hops), patches
        self.chunk_size, self.seed = chunk_size, seed
        self.forward_passes = 2 * patches
        self.near = torch.stack([neighbourhoods(grid, hop) for hop in hops])

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        images, index = batch["image"], batch["index"]
        self.near = self.near.to(images.device)
        patch = random_patches(index, self.grid.num_patches, self.patches, stream("patches", self.seed, epoch))
        counter = index[:, None] * self.grid.num_patches + patch
        hop = (uniform(counter, stream("hops", self.seed, epoch)) * len(self.hops)).long()  # (B, Z)
        normalised = self.target.normalise(images)
        with torch.no_grad():
            meta = meta_attribution(self.target.embed, normalised, self.near[hop, patch], self.grid, self.chunk_size)
        return {"patch": patch, "meta": meta}

    def key(self) -> dict[str, str]:
        return self.target.identity() | {
            "source": "meta-attributions",
            "patches_per_side": str(self.grid.side),
            "hops": str(self.hops),
            "patches": str(self.patches),
            "seed": str(self.seed),
        }
