"""KernelSHAP (Lundberg & Lee, 2017): Shapley values of patches, fitted to what a model says of coalitions of them."""

from typing import Literal

import torch
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.shapley.coalitions import CoalitionValues, Score
from explainers.target import TargetModel


def fit_shapley(keep: Tensor, values: Tensor, null: Tensor, grand: Tensor, weights: Tensor | None = None) -> Tensor:
    """φ that fits v(S) ≈ v(nothing) + Σ_{z ∈ S} φ_z best, of all that sum to v(all) − v(nothing).

    These are the Shapley values, exactly, when every coalition counts with its Shapley kernel. Coalitions that do not
    determine φ leave the rest of it as equal as can be.

    Args:
        keep: S, boolean (B, M, N). values: v(S), (B, M, K). null, grand: v(nothing) and v(all), (B, K).
        weights: of the coalitions, (B, M); `None` for coalitions that were drawn from the Shapley kernel.

    Returns:
        (B, N, K).
    """
    with torch.autocast(keep.device.type, enabled=False):
        members, gain = keep.double(), (values - null[:, None]).double()
        even = (grand - null).double()[:, None] / keep.shape[-1]  # (B, 1, K)
        gain = gain - members.sum(-1, keepdim=True) * even
        members = members - members.mean(-1, keepdim=True)  # changes of φ that sum to 0
        weighted = members if weights is None else members * weights.double()[..., None]
        inverse = torch.linalg.pinv(weighted.mT @ members, rtol=1e-9, hermitian=True)
        return (even + inverse @ (weighted.mT @ gain)).to(values.dtype)


class ShapleyLabels:
    """A source (see `sources`): KernelSHAP attributions of images, to learn from or to compare with.

    Rows: `explained` (B,), a class of each image, and `shapley` (B, N), the attributions of the patches to it; with
    `classes="all"`, `shapley` (B, N, K) alone.

    Args:
        model: the model that is explained.
        budget: coalitions of each image, besides the whole image and nothing.
        score: what a coalition is worth, see `CoalitionValues`.
        classes: explain the `label` of each image, the `predicted` class, or `all`.
        paired: see `shapley_coalitions`. chunk_size: masked images in memory at a time. seed: of the coalitions.
    """

    def __init__(
        self,
        model: TargetModel,
        grid: PatchGrid,
        budget: int = 500,
        score: Score = "probability",
        classes: Literal["label", "predicted", "all"] = "label",
        paired: bool = True,
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        self.classes = classes
        self.provides = ("shapley",) if classes == "all" else ("explained", "shapley")
        self.forward_passes = budget + 1
        self.values = CoalitionValues(model, grid, budget, seed, paired, chunk_size, score)

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        seen = self.values(batch)  # of the first epoch, always: labels stay what they are
        if self.classes == "all":
            return {"shapley": fit_shapley(seen["keep"], seen["values"], seen["null"], seen["grand"])}
        explained = batch["label"] if self.classes == "label" else seen["grand"].argmax(-1)
        if explained.min() < 0 or explained.max() >= seen["grand"].shape[-1]:
            raise InputError(
                f"expected labels from 0 to {seen['grand'].shape[-1] - 1}, got {explained.tolist()}, where -1 is an"
                " image without one: take labelled images, or labels.classes=predicted"
            )
        values, null, grand = (
            seen[name].take_along_dim(explained.view(-1, *[1] * (seen[name].dim() - 1)), -1)
            for name in ("values", "null", "grand")
        )
        return {"explained": explained, "shapley": fit_shapley(seen["keep"], values, null, grand)[..., 0]}

    def key(self) -> dict[str, str]:
        head = self.values.target.head.extra_repr()  # what its hash does not tell
        return self.values.key() | {"source": "KernelSHAP", "classes": self.classes, "head": head}


class KernelSHAP(nn.Module):
    """Explains with KernelSHAP: `budget` + 1 forward passes of the target for each image, all of the same coalitions.

    Args:
        budget, score, paired, chunk_size, seed: see `ShapleyLabels`.
    """

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        budget: int = 500,
        score: Score = "probability",
        paired: bool = True,
        chunk_size: int = 256,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.target, self.grid, self.forward_passes = target, grid, budget + 1
        self.labels = ShapleyLabels(target, grid, budget, score, "label", paired, chunk_size, seed)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        same = torch.zeros(len(images), dtype=torch.long, device=images.device)  # whatever its place in a batch
        phi = self.labels({"image": images, "label": classes, "index": same})["shapley"]
        return phi.unflatten(-1, (self.grid.side, -1))
