"""Faithfulness: how the prediction changes when patches are removed, or kept, in order of importance."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from explainers.errors import InputError, checks_choices
from explainers.masking import level_sizes, select_most_important
from explainers.metrics.curves import CURVES, QUANTITIES, TOP, Curve
from explainers.metrics.means import PerImage, moments
from explainers.models.scores import Score, log_probabilities, scale_logits
from explainers.runtime.sampling import random_patches

TIES = 0x7E5  # seed of the order of patches with equal scores


def importance_order(scores: Tensor, index: Tensor) -> Tensor:
    """Sort the patches of each image by importance; ties are in random order.

    That order depends on the index alone. So a heatmap of equal scores counts as a random explanation.

    Args:
        scores: scores of the patches, (B, N), higher is more important.
        index: index of each image in the data set, (B,).

    Returns:
        Patch numbers, the most important first: int64, (B, N).

    >>> importance_order(torch.tensor([[0.5, 0.1, 0.9], [0.0, 0.0, 0.0]]), torch.tensor([0, 5])).tolist()
    [[2, 0, 1], [1, 2, 0]]
    """
    shuffled = random_patches(index, scores.shape[-1], scores.shape[-1], TIES)
    ranked = scores.gather(-1, shuffled).argsort(dim=-1, descending=True, stable=True)
    return shuffled.gather(-1, ranked)


@torch.no_grad()
def perturbation_sweep(
    predict: Callable[[Tensor], Tensor],
    order: Tensor,
    classes: Tensor,
    levels: int = 21,
    labels: Tensor | None = None,
    ends: Tensor | None = None,
    sides: tuple[bool, bool] = (True, True),
    until: float = 1.0,
    score: Score = "softmax",
) -> Tensor:
    """Compute the target's outputs without S* (removed), and with S* only (preserved), at Q levels of sparsity.

    All `CURVES` are computed from these outputs.

    Args:
        predict: function from visible patches, boolean (B, M, N), to logits (B, M, K), see `masked_outputs`.
        order: patch numbers, the most important first, (B, N), see `importance_order`.
        classes: the class to explain in each image, (B,).
        levels: Q, the number of sparsities from 0 to `until`, at least 2.
        labels: the label of each image, (B,), −1 for an unlabelled image; `None` if no image is labelled.
        ends: logits of the whole and of the empty image, (B, 2, K); `None` computes them.
        sides: whether to compute the removed and the preserved outputs, see `find_needed_sides`. Outputs that are not
            computed are 0, except for the whole and the empty image.
        until: the largest sparsity, at most 1; below 1, the whole image is the first level of the removed side alone,
            and the empty one that of the preserved side.
        score: what the logits mean; the quantity `probability` of a `value` is the value, `log_probability` NaN.

    Returns:
        float64, (B, 6, 2, Q): the six `QUANTITIES`, removed and preserved, levels. Those of `TOP` are NaN without a
        label.

    >>> image = torch.tensor([[0.5], [0.25], [0.125], [0.125]])  # the probability is the sum over visible patches
    >>> predict = lambda keep: torch.cat([keep.float() @ image, 1 - keep.float() @ image], -1).log()
    >>> curves = perturbation_sweep(predict, torch.tensor([[0, 1, 2, 3]]), torch.tensor([0]), levels=3)
    >>> curves[0, QUANTITIES.index("probability")].round(decimals=6).tolist()
    [[1.0, 0.25, 0.0], [0.0, 0.75, 1.0]]
    """
    important = select_most_important(order, levels, until)  # (B, Q, N)
    inner = inner_levels(levels, until)
    masks = [keep[:, 1 : 1 + inner] for keep, needed in zip((~important, important), sides, strict=True) if needed]
    if ends is None:  # both curves begin, and if all is removed end, at the whole and the empty image
        ends = predict(torch.stack([~important[:, 0], important[:, 0]], 1))
    parts = [ends, predict(torch.cat(masks, 1))] if inner and masks else [ends]
    logits = torch.cat(parts, 1).double()  # (B, M, K)
    of_class = classes[:, None, None].expand(-1, logits.shape[1], 1)
    kinds = scale_logits(logits, score), log_probabilities(logits, score), logits
    of_classes = [kind.gather(-1, of_class).squeeze(-1) for kind in kinds]
    outputs = torch.stack([*of_classes, *_correct(logits, labels)], 1)  # (B, 6, M)
    whole, empty, *computed = outputs.split([1, 1, *[inner] * len(masks)], -1)
    left_out = torch.zeros_like(whole).expand(-1, -1, inner)
    removed, preserved = (computed.pop(0) if needed else left_out for needed in sides)
    both = [torch.cat([whole, removed, empty], -1), torch.cat([empty, preserved, whole], -1)]
    return torch.stack(both, 2)[..., :levels]


def inner_levels(levels: int, until: float = 1.0) -> int:
    """The number of levels of each side that are neither the whole nor the empty image."""
    return levels - (2 if until == 1 else 1)


def _correct(logits: Tensor, labels: Tensor | None) -> list[Tensor]:
    """Whether the label (B,) is among the k highest logits (B, M, K), for each of `TOP`: (B, M), NaN if unknown.

    Of equal logits, the one of the lower class counts as higher, as in `argmax`.
    """
    if labels is None:
        return [torch.full_like(logits[..., 0], torch.nan)] * len(TOP)
    num_classes = logits.shape[-1]
    wanted = labels.clamp(0, num_classes - 1)[:, None, None].expand(-1, logits.shape[1], 1)
    own = logits.gather(-1, wanted)
    before = torch.arange(num_classes, device=logits.device) < wanted
    rank = (~(logits <= own) | (logits == own) & before).sum(-1)  # (B, M), 0 is the highest; NaN counts as higher
    rank = rank.masked_fill(labels[:, None] >= num_classes, max(TOP.values()))  # no class of the target: never correct
    return [(rank < k).double().masked_fill(labels[:, None] < 0, torch.nan) for k in TOP.values()]


def curve_columns(curves: Sequence[str], removal: str = "") -> dict[str, str]:
    """Name the number of each curve, and title its column; a `removal` that is not empty is added to both."""
    suffix, note = (f"_{removal}", f" ({removal})") if removal else ("", "")
    return {f"{name}{suffix}": f"{CURVES[name].title}{note}" for name in curves}


class PerturbationCurves(PerImage):
    """Mean areas and mean curves of perturbation sweeps, over images. The areas of every image are kept.

    `compute` returns the number of `images`, the exact fractions |S*| / N as `sparsity` (Q,), and of each curve the
    mean area (or mean over levels, see `Shape`) as `<curve>`, its standard error over images as `<curve>_error`, if
    there are two, and the mean curve as `<curve>_curve` (Q,). Accuracies are those of labelled images, if any.

    Args:
        num_patches: N, the number of patches, or of pixels if single pixels are removed.
        curves: names of `CURVES`.
        levels: Q, the number of sparsities from 0 to `until`, at least 2.
        empty: if False, the areas leave out the level at which nothing is visible, as in SkipPLUS and Chefer. Deletion
            then covers 0 to 1 − 1 / (Q − 1), insertion 1 / (Q − 1) to 1, and the areas are not rescaled.
        removal: suffix of the names of all curves, which tells what replaced the patches; "" adds none.
        until: the largest sparsity, at most 1. Areas cover 0 to `until`, and are not divided by it. Below 1, the
            relevance gain of a random order is not 0.

    >>> metric = PerturbationCurves(num_patches=4, curves=["fidelity_plus", "deletion"], levels=3)
    >>> removed, preserved = torch.tensor([1.0, 0.25, 0.0]), torch.tensor([0.0, 0.75, 1.0])
    >>> metric.update(torch.stack([removed, preserved]).expand(1, 6, 2, 3))
    >>> result = metric.compute()
    >>> result["fidelity_plus_curve"].tolist(), result["fidelity_plus"].item(), result["deletion"].item()
    ([0.0, 0.75, 1.0], 0.625, 0.375)
    """

    higher_is_better = None  # differs between the curves
    points: Tensor

    @checks_choices
    def __init__(
        self,
        num_patches: int,
        curves: Sequence[Curve],
        levels: int = 21,
        empty: bool = True,
        removal: str = "",
        until: float = 1.0,
    ) -> None:
        super().__init__(len(curves))
        if levels < 3 and not empty:
            raise InputError(f"expected levels of at least 3 to leave out the empty image, got levels={levels}")
        self.curves = tuple(curves)
        self.empty = empty
        self.removal = removal
        self.until = until
        self.sparsity = level_sizes(num_patches, levels, until).double() / num_patches
        shapes = [CURVES[name] for name in self.curves]
        self.quantities = [QUANTITIES.index(shape.quantity) for shape in shapes]
        # For each side: the factor of the whole image, if the curve compares it with this side, and that of the side
        sides = [((s.whole * bool(s.removed), s.removed), (s.whole * (not s.removed), s.preserved)) for s in shapes]
        self.factors = torch.tensor(sides).double().view(-1, 2, 2)
        self.means = torch.tensor([shape.mean for shape in shapes], dtype=torch.bool)
        self.add_state("points", torch.zeros(len(shapes), levels, dtype=torch.double), dist_reduce_fx="sum")

    def update(self, outputs: Tensor) -> None:
        """Add the outputs of images, (B, 6, 2, Q), as `perturbation_sweep` returns them."""
        sides = outputs[:, self.quantities].double()  # (B, curves, 2, Q)
        factors = self.factors.to(outputs.device)
        sides = factors[..., :1] * sides[:, :, :1, :1] + factors[..., 1:] * sides
        self.keep(self._areas(sides))
        self.points += sides.sum(2).nan_to_num().sum(0)

    def _areas(self, sides: Tensor) -> Tensor:
        """Sum the areas, or means, of the removed and preserved sides: (B, curves, 2, Q) → (B, curves)."""
        sparsity, first = self.sparsity.to(sides.device), 0 if self.empty else 1
        last = len(sparsity) - first * (self.until == 1)
        ends = slice(0, last), slice(first, None)  # the levels with visible patches
        parts = [(sides[:, :, side, end], sparsity[end]) for side, end in enumerate(ends)]
        areas = torch.stack([torch.trapezoid(values, at, dim=-1) for values, at in parts]).sum(0)
        means = torch.stack([values.mean(-1) for values, _ in parts]).sum(0)
        return torch.where(self.means.to(sides.device), means, areas)

    def name_numbers(self, name: str, rows: Tensor) -> dict[str, Tensor]:
        return dict(zip(curve_columns(self.curves, self.removal), rows.unbind(1), strict=True))

    def compute(self) -> dict[str, Tensor]:
        areas = self.rows()
        count = (~areas.isnan()).sum(0)
        mean, _, errors = moments(areas)
        result = {"images": torch.tensor(len(areas)), "sparsity": self.sparsity}
        for number, name in enumerate(curve_columns(self.curves, self.removal)):
            if count[number] > 0:
                result |= {name: mean[number], f"{name}_curve": self.points[number] / count[number]}
            if count[number] > 1:
                result[f"{name}_error"] = errors[number]
        return result
