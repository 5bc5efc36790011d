"""KernelSHAP (Lundberg & Lee, 2017): Shapley values of patches, fitted to the values of random coalitions."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from explainers.errors import InputError, check_positive, checks_choices
from explainers.masking import PatchGrid, Removal
from explainers.models import TargetModel
from explainers.models.inputs import check_labels, checked_classes
from explainers.posthoc import build
from explainers.runtime.modes import to_float64
from explainers.saved.identity import Identity
from explainers.shapley.coalition_values import CoalitionValues, Score
from explainers.shapley.prior import fit_with_prior


def fit_shapley(keep: Tensor, values: Tensor, null: Tensor, grand: Tensor, weights: Tensor | None = None) -> Tensor:
    """The least-squares fit of v(S) ≈ v(∅) + Σ_{z ∈ S} φ_z under the constraint Σ_z φ_z = v(all) − v(∅).

    With all coalitions, each weighted by its Shapley kernel, φ is exactly the Shapley value. Where the coalitions do
    not determine φ, the solution closest to equal attributions is returned.

    With v(∅) = 0, v({1}) = 1, v({2}) = 2 and v({1, 2}) = 4, the mean marginal contributions are 3/2 and 5/2:

    >>> keep, values = torch.tensor([[[True, False], [False, True]]]), torch.tensor([[[1.0], [2.0]]])
    >>> phi = fit_shapley(keep, values, null=torch.zeros(1, 1), grand=torch.full((1, 1), 4.0))
    >>> phi.round(decimals=4).tolist()
    [[[1.5], [2.5]]]

    Args:
        keep: coalitions S, boolean (B, M, N).
        values: v(S), (B, M, K).
        null: v(∅), of no patch, (B, K).
        grand: v(all), of all patches, (B, K).
        weights: weights of the coalitions, (B, M); `None` for coalitions that were drawn from the Shapley kernel.

    Returns:
        (B, N, K).
    """
    with torch.autocast(keep.device.type, enabled=False):
        members = to_float64(keep)
        gain = to_float64(values - null[:, None])
        even = to_float64(grand - null)[:, None] / keep.shape[-1]  # (B, 1, K)
        gain = gain - members.sum(-1, keepdim=True) * even
        members = members - members.mean(-1, keepdim=True)  # so that deviations from `even` sum to 0
        weighted = members if weights is None else members * to_float64(weights)[..., None]
        inverse = torch.linalg.pinv(weighted.mT @ members, rtol=1e-9, hermitian=True)
        return (even + inverse @ (weighted.mT @ gain)).to(values)


class ShapleyLabels:
    """A source (see `sources`) of KernelSHAP attributions, for training or as a reference.

    Rows: `explained` (B,), one class of each image, and `shapley` (B, N), the attributions of the patches to that
    class. With `classes="all"` the only row is `shapley` (B, N, K).

    Args:
        model: the model to explain.
        grid: the patches that are explained.
        budget: number of coalitions of each image, without the empty one and the whole image.
        score: v, the value of a coalition, see `CoalitionValues`.
        classes: explain the `label` of each image, the `predicted` class, or `all` classes.
        paired: see `shapley_coalitions`.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the coalitions.
        removal: see `CoalitionValues`.
        prior: name of a method without training, see `posthoc.build`, whose heatmaps the fit starts from, see
            `fit_with_prior`; `None` for `fit_shapley`. Not for `classes="all"`.
    """

    @checks_choices
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
        removal: Removal = "zero",
        prior: str | None = None,
    ) -> None:
        check_positive(budget=budget)
        if prior is not None and classes == "all":
            raise InputError("expected labels.classes=label or predicted with labels.prior, got all")
        model.check_grid(grid)
        self.classes = classes
        self.paired = paired
        self.prior = prior
        self.map: Any = None if prior is None else build(prior, model, grid)
        self.provides = ("shapley",) if classes == "all" else ("explained", "shapley")
        self.entries = ("image", "label") if classes == "label" else ("image",)
        self.forward_passes = budget + 1
        self.values = CoalitionValues(model, grid, budget, seed, paired, chunk_size, score, removal)

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        rows = self.values(batch)  # always those of epoch 0, because labels must not change between epochs
        if self.classes == "all":
            return {"shapley": fit_shapley(rows["keep"], rows["values"], rows["null"], rows["grand"])}
        explained = batch["label"] if self.classes == "label" else rows["grand"].argmax(-1)
        check_labels(explained, rows["grand"].shape[-1], "labels.classes=predicted")
        values, null, grand = (
            rows[name].take_along_dim(explained.view(-1, *[1] * (rows[name].dim() - 1)), -1)
            for name in ("values", "null", "grand")
        )
        if self.map is None:
            phi = fit_shapley(rows["keep"], values, null, grand)
        else:
            prior = self.map(batch["image"], explained).detach().flatten(1)[..., None]
            phi = fit_with_prior(rows["keep"], values, null, grand, prior, self.paired)
        return {"explained": explained, "shapley": phi[..., 0]}

    def key(self) -> Identity:
        own = {"source": "KernelSHAP", "classes": self.classes, "values": self.values.key()}
        return own | ({} if self.prior is None else {"prior": self.prior})


class KernelSHAP(nn.Module):
    """Explains with KernelSHAP: `budget` + 1 forward passes of the target for each image, with equal coalitions.

    Args:
        target: the model to explain.
        grid: the patches that are explained.
        budget: number of coalitions, see `ShapleyLabels`.
        score: value of a coalition, see `CoalitionValues`.
        paired: see `shapley_coalitions`.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the coalitions.
        removal: see `CoalitionValues`.
        prior: see `ShapleyLabels`.
    """

    signed = True

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        budget: int = 500,
        score: Score = "probability",
        paired: bool = True,
        chunk_size: int = 256,
        seed: int = 1,
        removal: Removal = "zero",
        prior: str | None = None,
    ) -> None:
        super().__init__()
        self.target = target
        self.grid = grid
        self.forward_passes = budget + 1
        self.labels = ShapleyLabels(target, grid, budget, score, "label", paired, chunk_size, seed, removal, prior)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        self.grid.check(images)
        classes = checked_classes(classes, images, self.target.num_classes)
        index = torch.zeros(len(images), dtype=torch.long, device=images.device)  # equal coalitions for all images
        phi = self.labels({"image": images, "label": classes, "index": index})["shapley"]
        return phi.unflatten(-1, (self.grid.side, -1))
