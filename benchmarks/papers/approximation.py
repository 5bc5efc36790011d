"""Whether two coalitions approximate the mean over all coalitions (TVE, Appendix B and Figure 8)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning import LightningModule
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics import CatMetric

from benchmarks.papers.figures import require
from explainers import Explainer
from explainers.errors import InputError, check_distinct, check_positive, check_range
from explainers.evaluation.measurement import check_heatmaps, check_target
from explainers.evaluation.passes import find_modules, forward_passes
from explainers.masking import PatchGrid, masked_forward, neighbourhoods
from explainers.metrics.agreement import rank_correlation, spearman
from explainers.models import TargetModel
from explainers.report.labels import make_title
from explainers.report.results import Results
from explainers.runtime.sampling import random_patches, stream, uniform
from explainers.saved.identity import recipe
from explainers.tve.oracle import Oracle


def random_subsets(index: Tensor, patches: Tensor, near: Tensor, count: int, seed: int) -> Tensor:
    """`count` uniform subsets B of Z(x) \\ N(z): each patch outside N(z) is in B with probability 1/2.

    >>> near = torch.tensor([[[True, True, False, False]]])
    >>> subsets = random_subsets(torch.tensor([5]), torch.tensor([[0]]), near, count=3, seed=0)
    >>> list(subsets.shape), (subsets & near).any().item()
    ([1, 1, 3, 4], False)

    Args:
        index: index of each image in the data set, (B,).
        patches: Z patches z of each image, (B, Z).
        near: N(z) of these patches, boolean (B, Z, N).
        count: number of subsets for each patch, (B, Z, count, N).
        seed: seed of the draws.
    """
    num_patches = near.shape[-1]
    patch = index[:, None] * num_patches + patches  # (B, Z)
    subset = patch[..., None] * count + torch.arange(count, device=near.device)  # (B, Z, count)
    counter = subset[..., None] * num_patches + torch.arange(num_patches, device=near.device)
    return (uniform(counter, seed) < 0.5) & ~near[:, :, None]


@torch.no_grad()
def gains(
    predict: Callable[[Tensor], Tensor],
    images: Tensor,
    classes: Tensor,
    near: Tensor,
    subsets: Tensor,
    grid: PatchGrid,
    chunk_size: int = 256,
) -> Tensor:
    """The gain log f(N(z) ∪ B) − log f(B) in the log-probability of a class, whose mean over B estimates Equation 2.

    >>> images, near = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), torch.tensor([[[True, False, False, False]]])
    >>> grid, subsets = PatchGrid(image_size=2, patch_size=1), torch.tensor([[[[False, True, False, False]]]])
    >>> gains(lambda x: x.sum((2, 3)) ** 2, images, torch.tensor([0]), near, subsets, grid).tolist()  # (1 + 2)² − 2²
    [[[5.0]]]

    Args:
        predict: normalised images (b, C, H, W) → log-probabilities (b, K).
        images: normalised images, (B, C, H, W).
        classes: the class of each image, (B,).
        near: N(z) of Z patches of each image, boolean (B, Z, N).
        subsets: subsets B for each patch, boolean (B, Z, count, N).
        grid: the patches.
        chunk_size: maximum number of masked images in memory.

    Returns:
        (B, Z, count).
    """
    with_near = subsets | near[:, :, None]
    keep = torch.cat([subsets.flatten(1, 2), with_near.flatten(1, 2)], 1)  # (B, M, N), M = 2·Z·count
    scores = masked_forward(predict, images, keep, grid, chunk_size=chunk_size)  # (B, M, K)
    scores = scores.gather(-1, classes[:, None, None].expand(-1, keep.shape[1], 1)).squeeze(-1).double()
    alone, together = scores.chunk(2, 1)
    return (together - alone).unflatten(1, subsets.shape[1:3])


def log_probabilities(target: TargetModel, normalised: Tensor) -> Tensor:
    """Compute log f of normalised images (B, C, H, W), for all classes: (B, K)."""
    return target.classify(target.embed(normalised)).log_softmax(-1)


class TwoPoint(Oracle):
    """Equation 3, the mean gain over B = Z(x) \\ N(z) and B = ∅, for arguments see `Oracle`.

        ½ [log f(Z(x)) − log f(Z(x) \\ N(z)) + log f(N(z)) − log f(∅)]

    Equation 4, the oracle's, leaves out the factor ½ and the term log f(Z(x)) − log f(∅), which are the same for all
    patches of an image. It ranks the patches of an image equally, but its values are not comparable between images.
    """

    @torch.no_grad()
    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        normalised = self.target.normalise(images)
        gain = log_probabilities(self.target, normalised) - log_probabilities(self.target, torch.zeros_like(normalised))
        return (super().forward(images, classes) + gain.take_along_dim(classes[:, None], 1)[..., None]) / 2


@dataclass(frozen=True)
class Subsets:
    """Settings of a study of sampled subsets.

    Args:
        grid: the patches.
        hops: radius of N(z), in patches.
        patches: Z, number of sampled patches of each image.
        subsets: numbers of sampled subsets; a smaller number uses the first subsets of the largest.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the draws of patches and subsets.
    """

    grid: PatchGrid
    hops: int = 2
    patches: int = 16
    subsets: Sequence[int] = (16, 32)
    chunk_size: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(chunk_size=self.chunk_size)
        if not self.subsets or min(self.subsets) < 1:
            raise InputError(f"expected subsets, numbers above 0, such as [16, 32], got {list(self.subsets)}")
        check_distinct(subsets=self.subsets)
        check_range(2, self.grid.num_patches, patches=self.patches)


class TwoPointStudy(LightningModule):
    """Measures how attributions correlate with Equation 2 (`metrics=two_point`).

    For each attribution of the predicted class, `results` holds:

    - `attribution`: its value for every sampled patch.
    - `expectation_<count>`: the mean gain of each patch over its first `count` subsets.
    - `pearson_<count>` and `spearman_<count>`: the correlations of the two over all patches.
    - `within_images_<count>`: the rank correlation over the patches of one image, averaged over images.

    Args:
        target: the model to explain.
        explainers: name → explainer of this target on this grid, such as `TwoPoint`.
        settings: what is measured.
        measured: names of the explainers to measure; `None` measures all.
    """

    near: Tensor

    def __init__(
        self,
        target: TargetModel,
        explainers: Mapping[str, Explainer],
        settings: Subsets,
        measured: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_target(target, settings.grid)
        self.target = target
        self.settings = settings
        self.explainers = {name: explainers[name] for name in (explainers if measured is None else measured)}
        self.parts = find_modules(self.explainers.values())
        self.register_buffer("near", neighbourhoods(settings.grid, settings.hops), persistent=False)
        self.patch_rows = CatMetric(nan_strategy="disable")  # one row for each image and patch
        self.results: dict[str, dict[str, Any]] = {}
        self.scores = None  # its numbers are of patches
        self.measured: dict[str, Any] = {}

    @property
    def columns(self) -> dict[str, str]:
        """Column titles of the numbers in `results` that tables show."""
        titles = {"pearson": "r, {} subsets ↑", "spearman": "ρ, {} subsets ↑", "within_images": "ρ within images, {} ↑"}
        return {
            f"{key}_{count}": title.format(count) for key, title in titles.items() for count in self.settings.subsets
        }

    @property
    def forward_passes(self) -> dict[str, int]:
        """Forward passes of the target for each image, by explainer; `coalitions` are those of the study."""
        coalitions = 1 + 2 * self.settings.patches * max(self.settings.subsets)
        return forward_passes(self.explainers) | {"coalitions": coalitions}

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        own, index, normalised = self.settings, batch["index"], self.target.normalise(batch["image"])
        predicted = self.target.classify(self.target.embed(normalised)).argmax(-1)
        patches = random_patches(index, own.grid.num_patches, own.patches, stream("patches", own.seed, 0))
        near = self.near[patches]  # (B, Z, N)
        subsets = random_subsets(index, patches, near, max(own.subsets), stream("coalitions", own.seed, 0))
        predict = partial(log_probabilities, self.target)
        terms = gains(predict, normalised, predicted, near, subsets, own.grid, own.chunk_size)
        heatmaps = {name: explainer(batch["image"], predicted) for name, explainer in self.explainers.items()}
        for name, heatmap in heatmaps.items():
            check_heatmaps(name, heatmap, batch["image"], own.grid)
        right = (predicted == batch["label"]).double().masked_fill(batch["label"] < 0, torch.nan)  # (B,)
        attributions = [heatmap.flatten(1).gather(1, patches) for heatmap in heatmaps.values()]
        expectations = [terms[..., :count].mean(-1) for count in own.subsets]
        of_image = [column[:, None].expand_as(patches) for column in (index, right)]
        columns = [*of_image, *expectations, *attributions]
        self.patch_rows.update(torch.stack([column.double() for column in columns], -1))
        return {"heatmaps": heatmaps, "classes": predicted}

    def on_test_epoch_end(self) -> None:
        own = self.settings
        rows = self.patch_rows.compute().reshape(-1, own.patches, 2 + len(own.subsets) + len(self.explainers))
        rows = rows[rows[:, 0, 0].argsort()]  # sorted by image, for any number of processes
        accuracy = rows[:, 0, 1].nanmean().item()
        self.measured = {"images": len(rows), "precision": self.trainer.precision}
        self.measured |= {"accuracy": accuracy} if accuracy == accuracy else {}  # NaN without labels
        expectations = dict(zip(own.subsets, rows[..., 2:].unbind(-1), strict=False))
        attributions = rows[..., 2 + len(own.subsets) :].unbind(-1)
        for name, attribution in zip(self.explainers, attributions, strict=True):
            numbers: dict[str, Any] = {"images": len(rows), "subsets": list(own.subsets)}
            numbers["attribution"] = attribution.flatten().tolist()
            for count, expectation in expectations.items():
                numbers[f"expectation_{count}"] = expectation.flatten().tolist()
                pairs = correlations(attribution, expectation).items()
                numbers |= {f"{key}_{count}": value for key, value in pairs if value == value}  # NaN for a constant
            self.results[name] = numbers

    def identity(self) -> dict[str, Any]:
        """The settings that the results depend on; results are comparable only if all of these are equal."""
        grid, settings = self.settings.grid, recipe(self.settings, without=("grid",))
        places = {"image_size": list(grid.size), "shape": list(grid.shape), "classes": "predicted"}
        return {**self.target.identity(), **places, **settings, **self.measured}


def correlations(first: Tensor, second: Tensor) -> dict[str, float]:
    """Correlations of two attributions (B, Z) of the same patches: over all patches, and by rank within images.

    >>> first, second = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2.0, 1.0], [4.0, 3.0]])
    >>> {name: round(value, 3) for name, value in correlations(first, second).items()}
    {'pearson': 0.6, 'spearman': 0.6, 'within_images': -1.0}
    """
    return {
        "pearson": torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1].item(),
        "spearman": spearman(first.reshape(1, -1), second.reshape(1, -1)).item(),
        "within_images": rank_correlation(first, second).nanmean().item(),
    }


def approximation_scatter(results: Results, explainer: str = "two_point") -> Figure:
    """The expectation of Equation 2 against an attribution that approximates it (TVE, Figure 8): one point per patch.

    The figure has one row per task and one column per number of sampled subsets; `two_point` is Equation 3.
    """
    chosen = {task: {explainer: measured[explainer]} for task, measured in results.items() if explainer in measured}
    require(chosen, "attribution", "subsets")
    counts = next(iter(chosen.values()))[explainer]["subsets"]
    figure = Figure(figsize=(1 + 3.8 * len(counts), 0.4 + 3.6 * len(chosen)), layout="constrained")
    axes = figure.subplots(len(chosen), len(counts), squeeze=False, sharex="row", sharey="row")
    for row, (task, measured) in zip(axes, chosen.items(), strict=True):
        numbers = measured[explainer]
        for axis, count in zip(row, counts, strict=True):
            axis.scatter(numbers["attribution"], numbers[f"expectation_{count}"], s=12, alpha=0.5, linewidths=0)
            pearson, spearman = (numbers.get(f"{name}_{count}", math.nan) for name in ("pearson", "spearman"))
            axis.set_title(f"{task}, {count} subsets: r = {pearson:.2f}, ρ = {spearman:.2f}", fontsize=10)
            axis.set_xlabel(
                "B ∈ {everything else, nothing} (Eq. 3)" if explainer == "two_point" else make_title(explainer)
            )
            axis.grid(alpha=0.3)
        row[0].set_ylabel("B of sampled subsets (Eq. 2)")
    return figure
