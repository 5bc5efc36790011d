"""Means and ratios over all images; numbers of single images with standard errors; the values of several metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from explainers.errors import needs

try:
    from torchmetrics import Metric
except ModuleNotFoundError:  # the formulas can be imported without it

    class TorchmetricsMissing(nn.Module):
        """Stands for a class of torchmetrics, which only the accumulation over batches needs."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            needs("torchmetrics", "methods", type(self).__name__)

    Metric = TorchmetricsMissing  # type: ignore[assignment, misc]


def moments(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the mean, the standard deviation (with n − 1) and the standard error over images, of each column.

    Args:
        numbers: float64, (images, n); NaN is left out.

    Returns:
        float64, (n,) each; NaN for a mean of no image, and for the others of a single image.

    >>> [value.item() for value in moments(torch.tensor([[1.0], [3.0], [torch.nan]]))]
    [2.0, 1.4142..., 1.0]
    """
    count = (~numbers.isnan()).sum(0).double()
    mean = numbers.nanmean(0)
    variance = (numbers - mean).square().nansum(0) / (count - 1).clamp(min=1)
    deviation = variance.sqrt().masked_fill(count < 2, torch.nan)
    return mean, deviation, deviation / count.sqrt()


class Ratios(Metric):
    """Mean of `count` ratios of sums over all images; NaN if one number is, which torchmetrics' means leave out."""

    full_state_update = False
    numerators: Tensor
    denominators: Tensor

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        for name in ("numerators", "denominators"):
            self.add_state(name, torch.zeros(count, dtype=torch.double), dist_reduce_fx="sum")

    def update(self, numerators: Tensor, denominators: Tensor | int) -> None:
        """Add the sums over the images of a batch, a number or (count,) each."""
        self.numerators += numerators.detach()
        self.denominators += denominators

    def compute(self) -> Tensor:
        return (self.numerators / self.denominators).mean().float()


class Mean(Ratios):
    """Mean of numbers, NaN if one of them is or if there is none."""

    def update(self, values: Tensor) -> None:  # type: ignore[override]
        """Add numbers, of any shape."""
        super().update(values.double().sum(), values.numel())


class Accuracy(Mean):
    """Fraction of the labelled images that are classified correctly; NaN without labelled images."""

    higher_is_better = True
    column = "Accuracy ↑"

    def update(self, predicted: Tensor, labels: Tensor) -> None:  # type: ignore[override]
        """Add images, given their predicted classes (B,) and their labels (B,); the label −1 means unlabelled."""
        super().update((predicted == labels)[labels >= 0].float())


class PerImage(Metric):
    """Keeps a row of `width` numbers of every image, in their order, so that explainers are compared on equal images.

    A number is NaN where an image has none.
    """

    full_state_update = False
    kept: list[Tensor]

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.width = width
        self.add_state("kept", [], dist_reduce_fx="cat")

    def keep(self, numbers: Tensor) -> None:
        """Add the numbers of some images, (B, width)."""
        self.kept = [torch.cat([*self.kept, numbers.double()])]  # one tensor, which an unfinished test saves

    def rows(self) -> Tensor:
        """The numbers of all images, float64 (images, width): of this process, or within a `sync_context` of all."""
        if isinstance(self.kept, Tensor):  # after the states of several processes were joined
            return self.kept.double().view(-1, self.width)
        return torch.cat(self.kept) if self.kept else torch.zeros(0, self.width, dtype=torch.double, device=self.device)

    def scores(self, name: str) -> dict[str, Tensor]:
        """Name → number of each image of all processes, (images,); a metric of several numbers has own names."""
        with self.sync_context():
            return self.name_numbers(name, self.rows())

    def name_numbers(self, name: str, rows: Tensor) -> dict[str, Tensor]:
        """The columns of `rows` that are numbers of results, by their names."""
        return {name: rows[:, 0]}


class MeanOfImages(PerImage):
    """Mean over images of one number per image, with its standard error. Images whose number is NaN are left out."""

    higher_is_better = True

    def add(self, values: Tensor) -> None:
        """Add the numbers of all images of a batch, (B,)."""
        self.keep(values[:, None])

    def compute(self) -> Tensor:
        return moments(self.rows())[0][0].float()

    def standard_error(self) -> Tensor:
        """The standard error of the mean, over the images of all processes; NaN for a single image."""
        with self.sync_context():
            return moments(self.rows())[2][0].float()


class MeanOfValues(MeanOfImages):
    """Mean over images of a number that is computed before; its title in tables stands beside what computes it."""

    def update(self, values: Tensor) -> None:
        """Add the numbers of some images, (B,)."""
        self.add(values)


def collect_scores(metrics: Mapping[str, Any]) -> dict[str, Tensor]:
    """Name → number of each image, (images,), of those metrics (by name) that keep them."""
    scores: dict[str, Tensor] = {}
    for name, metric in metrics.items():
        if isinstance(metric, PerImage):
            scores |= metric.scores(name)
    return scores


def numbers(metrics: Mapping[str, Any], scores: Mapping[str, Tensor]) -> dict[str, Any]:
    """Compute several metrics: name → number; NaN is left out. A metric of several numbers has own names.

    A mean over images has its standard error, `<name>_error`, and the standard deviation of images, `<name>_sd`.

    Args:
        metrics: name → metric.
        scores: the `collect_scores` of the metrics.
    """
    computed: dict[str, Tensor] = {}
    for name, metric in metrics.items():
        value = metric.compute()
        computed |= value if isinstance(value, dict) else {name: value}
    for name, values in scores.items():
        _, deviation, error = (value[0] for value in moments(values[:, None]))
        computed |= {f"{name}_error": error, f"{name}_sd": deviation}
    plain = {name: value.tolist() for name, value in computed.items()}
    return {name: value for name, value in plain.items() if value == value}


@dataclass(frozen=True)
class ImageScores:
    """Numbers of the images of one task.

    Args:
        index: index of each image in the data set, ascending, int64 (images,).
        rows: explainer → number → its value for each image, float32 (images,); NaN for an image without one.
    """

    index: Tensor
    rows: Mapping[str, Mapping[str, Tensor]]

    def joined(self, other: "ImageScores") -> "ImageScores":
        """The rows of both, of `other` where both have an explainer; NaN for an image that only one of them has.

        >>> one = ImageScores(torch.tensor([0, 1]), {"a": {"x": torch.tensor([0.0, 1.0])}})
        >>> both = one.joined(ImageScores(torch.tensor([1, 2]), {"b": {"x": torch.tensor([5.0, 6.0])}}))
        >>> both.index.tolist(), both.rows["b"]["x"].tolist()
        ([0, 1, 2], [nan, 5.0, 6.0])
        """
        index = torch.cat([self.index, other.index]).unique()
        rows: dict[str, dict[str, Tensor]] = {}
        for part in (self, other):
            places = torch.searchsorted(index, part.index)
            for name, row in part.rows.items():
                empty = torch.full((len(index),), torch.nan)
                rows[name] = {number: empty.index_copy(0, places, values) for number, values in row.items()}
        return ImageScores(index, rows)
