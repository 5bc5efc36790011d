"""KernelSHAP (Lundberg & Lee, 2017): Shapley values of patches, fitted to the values of random coalitions."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from explainers.errors import InputError, check_positive, checks_choices
from explainers.masking import PatchGrid, Removal
from explainers.models import TargetModel
from explainers.models.inputs import check_labels, validate_classes
from explainers.posthoc import build
from explainers.runtime.modes import to_float64
from explainers.saved.identity import Identity
from explainers.shapley.coalition_values import CoalitionScore, CoalitionValues

STRENGTHS = 10.0 ** torch.arange(-6, 4.5, 0.5, dtype=torch.double)
"""Ridge strengths to choose from, in units of the largest squared singular value of the regression."""


def fit_with_prior(
    keep: Tensor, values: Tensor, null: Tensor, grand: Tensor, prior: Tensor, paired: bool = True
) -> Tensor:
    """Fit v(S) ≈ v(∅) + Σ_{z ∈ S} φ_z as `fit_shapley`, with ridge towards a prior instead of the pseudo-inverse.

    φ = (v(all) − v(∅)) / N + s π + δ, where π is the prior minus its mean. Least squares choose s ≥ 0 first, then ridge
    fits the remainder δ. For every image and class, the strength with the smallest leave-one-out error is taken. Where
    the prior is good or the coalitions are few, φ stays near the prior; with many coalitions, it becomes the plain fit.

    The other arguments and the result (B, N, K) are those of `fit_shapley`.

    Args:
        prior: a heatmap of each class, of any size and offset, (B, N, K).
        paired: every second coalition is the complement of the one before it. Only the difference of their values
            depends on φ, so a pair is one observation.
    """
    with torch.autocast(keep.device.type, enabled=False):
        members, gain, even = _deviations(keep, values, null, grand)
        if paired:
            pairs = keep.shape[1] // 2 * 2
            members = members[:, :pairs:2]
            gain = (gain[:, :pairs:2] - gain[:, 1:pairs:2]) / 2
        shape = to_float64(prior - prior.mean(1, keepdim=True))
        along = members @ shape  # what the prior predicts, (B, M, K)
        size = (along * gain).sum(1, keepdim=True) / along.square().sum(1, keepdim=True).clamp(min=1e-12)
        size = size.clamp(min=0)
        remainder = _ridge(members, gain - size * along)
        return (even + size * shape + remainder).to(values)


def _deviations(keep: Tensor, values: Tensor, null: Tensor, grand: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The regression of φ − `even`, whose sum is 0: members (B, M, N), gain (B, M, K) and `even` (B, 1, K)."""
    members = to_float64(keep)
    even = to_float64(grand - null)[:, None] / keep.shape[-1]
    gain = to_float64(values - null[:, None]) - members.sum(-1, keepdim=True) * even
    return members - members.mean(-1, keepdim=True), gain, even


def _ridge(members: Tensor, gain: Tensor) -> Tensor:
    """The ridge fit δ of gain (B, M, K) ≈ members (B, M, N) δ whose strength has the least leave-one-out error."""
    u, s, vh = torch.linalg.svd(members, full_matrices=False)  # (B, M, r), (B, r), (B, r, N)
    strengths = STRENGTHS.to(s.device)[:, None] * s[:, None, :1].square()  # (B, strengths, 1)
    kept = s[:, None].square() / (s[:, None].square() + strengths)  # of each direction, (B, strengths, r)
    projected = u.mT @ gain  # (B, r, K)
    errors = gain[:, None] - u[:, None] @ (kept[..., None] * projected[:, None])  # (B, strengths, M, K)
    leverage = kept @ u.square().mT  # (B, strengths, M)
    left_out = (errors / (1 - leverage).clamp(min=1e-6)[..., None]).square().mean(2)  # (B, strengths, K)
    best = left_out.argmin(1)  # (B, K)
    inverse = kept / s[:, None].clamp(min=1e-12)  # (B, strengths, r)
    chosen = inverse.gather(1, best[..., None].expand(-1, -1, s.shape[-1])).mT  # (B, r, K)
    return vh.mT @ (chosen * projected)


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
        members, gain, even = _deviations(keep, values, null, grand)
        weighted = members if weights is None else members * to_float64(weights)[..., None]
        inverse = torch.linalg.pinv(weighted.mT @ members, rtol=1e-9, hermitian=True)
        return (even + inverse @ (weighted.mT @ gain)).to(values)


class ShapleyLabels:
    """A source (see `sources`) of KernelSHAP attributions, for training or as a reference.

    Rows: `explained` (B,), one class of each image, and `shapley` (B, N), the attributions of the patches to that
    class. With `classes="all"` the only row is `shapley` (B, N, K).

    The arguments without a description are those of `CoalitionValues`.

    Args:
        model: the model to explain.
        budget: number of coalitions of each image, without the empty one and the whole image.
        classes: explain the `label` of each image, the `predicted` class, or `all` classes.
        prior: name of a method without training, see `posthoc.build`, whose heatmaps the fit starts from, see
            `fit_with_prior`; `None` for `fit_shapley`. Not for `classes="all"`.
    """

    @checks_choices
    def __init__(
        self,
        model: TargetModel,
        grid: PatchGrid,
        budget: int = 500,
        score: CoalitionScore = "probability",
        classes: Literal["label", "predicted", "all"] = "label",
        paired: bool = True,
        chunk_size: int = 256,
        seed: int = 0,
        removal: Removal = "zero",
        prior: str | None = None,
    ) -> None:
        check_positive(budget=budget)
        if prior is not None and classes == "all":
            raise InputError(
                "expected classes=label or predicted with a prior, got all: set prior=None", "classes", "prior"
            )
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
        check_labels(explained, rows["grand"].shape[-1], "set classes=predicted", "classes")
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
    """KernelSHAP as an explainer: `budget` + 1 forward passes of the target for each image, with equal coalitions.

    The arguments are those of `ShapleyLabels`.
    """

    signed = True

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        budget: int = 500,
        score: CoalitionScore = "probability",
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
        classes = validate_classes(classes, images, self.target.num_classes)
        index = torch.zeros(len(images), dtype=torch.long, device=images.device)  # equal coalitions for all images
        phi = self.labels({"image": images, "label": classes, "index": index})["shapley"]
        return phi.unflatten(-1, self.grid.shape)
