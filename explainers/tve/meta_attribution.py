"""Meta-attributions of a backbone, and the attributions to any class that follow from them (TVE, Definitions 1, 2)."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from explainers.errors import check_positive, check_range, checks_choices
from explainers.masking import PatchGrid, check_hops, masked_forward, neighbourhoods
from explainers.models import TargetModel
from explainers.sampling import random_patches, stream, uniform
from explainers.saved.identity import Identity, recipe

Score = Literal["log_probability", "logit"]
Reduction = Literal["sum", "mean"]


def meta_attribution(
    embed: Callable[[Tensor], Tensor], images: Tensor, near: Tensor, grid: PatchGrid, chunk_size: int = 256
) -> Tensor:
    """Definition 1: the embedding of N(z) alone, and that of all other patches.

    >>> images = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> near = torch.tensor([[[True, False, False, False]]])  # N(z) is the first of four patches
    >>> meta_attribution(lambda x: x.sum((2, 3)), images, near, PatchGrid(image_size=2, patch_size=1)).tolist()
    [[[[1.0], [9.0]]]]

    Args:
        embed: G, normalised images (B, C, H, W) → embeddings (B, D).
        images: normalised images, (B, C, H, W).
        near: N(z) of Z patches z of each image; boolean, (B, Z, N).
        grid: the patches.
        chunk_size: maximum number of masked images in memory.

    Returns:
        (B, Z, 2, D): g = G(N(z); x), then h = G(Z(x) \\ N(z); x).
    """
    keep = torch.stack([near, ~near], 2)  # (B, Z, 2, N)
    return masked_forward(embed, images, keep.flatten(1, 2), grid, chunk_size=chunk_size).unflatten(1, (-1, 2))


@checks_choices
def transfer(
    head: Callable[[Tensor], Tensor],
    meta: Tensor,
    h_weight: float = 1.0,
    score: Score = "log_probability",
    classes: Tensor | None = None,
) -> Tensor:
    """Definition 2: φ(z) = log H(g; y) − log H(h; y), the attribution of every patch to every class y, or to one.

    >>> meta = torch.tensor([[[[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]]])  # g and h of one patch
    >>> phi = transfer(torch.log, meta)  # with this head, g and h are themselves the probabilities of three classes
    >>> phi.exp().round(decimals=3).tolist()  # their ratios
    [[[2.0], [1.0], [0.5]]]

    Args:
        head: the task's classifier H, embeddings (..., D) → logits (..., K).
        meta: g and h of every patch, (B, N, 2, D).
        h_weight: factor of the second term; the released code has 0.
        score: `log_probability` as in the paper, or `logit` as in the released code.
        classes: the class to explain in each image, (B,); `None` explains all classes.

    Returns:
        (B, K, N), or with `classes` (B, N).
    """
    scores = head(meta).float()  # (B, N, 2, K)
    if score == "log_probability":
        scores = scores.log_softmax(-1)
    scores = scores.permute(0, 3, 1, 2) if classes is None else scores[torch.arange(scores.shape[0]), :, :, classes]
    return scores[..., 0] - h_weight * scores[..., 1]


class TVELoss:
    """Equation 7, a loss (see `sources`): the squared error of the meta-attributions of random patches.

    The patches are drawn anew every epoch.

    Rows: `patch` (B, Z), the indices of the patches, and `meta` (B, Z, 2, D), their meta-attributions.

    Args:
        target: the model whose backbone is G.
        grid: the patches.
        hops: radii of N(z), in patches; of several radii, one is drawn for every patch.
        patches_per_image: Z, number of patches of each image; the released code has 1.
        reduction: reduction of the squared error over D: `sum` as in Equation 7, or `mean` as in the released code.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the draws of patches and radii.
    """

    provides = ("patch", "meta")
    entries = ("image",)
    ratios = 1

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        hops: Sequence[int] = (2,),
        patches_per_image: int = 1,
        reduction: Reduction = "sum",
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        check_hops(hops)
        check_range(1, grid.num_patches, patches_per_image=patches_per_image)
        check_positive(chunk_size=chunk_size)
        self.target = target.eval()
        self.grid = grid
        self.hops = tuple(hops)
        self.patches_per_image = patches_per_image
        self.reduction = reduction
        self.chunk_size = chunk_size
        self.seed = seed
        self.forward_passes = 2 * patches_per_image
        self.near = torch.stack([neighbourhoods(grid, hop) for hop in hops])

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        images = batch["image"]
        index = batch["index"]
        self.near = self.near.to(images.device)
        seed = stream("patches", self.seed, epoch)
        patch = random_patches(index, self.grid.num_patches, self.patches_per_image, seed)
        counter = index[:, None] * self.grid.num_patches + patch
        hop = (uniform(counter, stream("hops", self.seed, epoch)) * len(self.hops)).long()  # (B, Z)
        normalised = self.target.normalise(images)
        with torch.no_grad():
            meta = meta_attribution(self.target.embed, normalised, self.near[hop, patch], self.grid, self.chunk_size)
        return {"patch": patch, "meta": meta}

    def loss(self, predicted: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """Equation 7 over Z patches of each image, whose exact meta-attributions are `meta` (B, Z, 2, D)."""
        errors = (predicted - rows["meta"]).float().square()
        return (errors.sum(-1) if self.reduction == "sum" else errors.mean(-1)).sum(-1).mean()

    def loss_sums(self, predicted: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, int]:
        """The sum of the errors of the images, and their number."""
        return self.loss(predicted, rows) * len(predicted), len(predicted)

    def key(self) -> Identity:
        own = {"source": "meta-attributions", "target": self.target.backbone_identity()}
        return own | recipe(self, without=(*own, "reduction"))
