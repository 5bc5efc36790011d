"""What an evaluation has measured, as numbers of explainers and of single images."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from explainers.metrics.means import PerImage, image_scores, numbers
from explainers.results.scores import ImageScores


class Indices(PerImage):
    """The index of each image in the data set, in the order in which metrics keep their numbers."""

    def update(self, index: Tensor) -> None:
        """Add the indices of some images, (B,)."""
        self.keep(index[:, None])

    def compute(self) -> Tensor:
        return self.rows()[:, 0].long()


def summary(metrics: Mapping[str, Any], indices: Indices) -> tuple[dict[str, dict[str, Any]], ImageScores]:
    """Compute the numbers of each explainer, and those of single images in the order of the data set.

    Every process has to call this function, because the metrics of all processes are joined.

    Args:
        metrics: explainer → its metrics by name.
        indices: the images.
    """
    index, order = indices.scores("index")["index"].sort()
    results, scores = {}, {}
    with warnings.catch_warnings():
        # A metric without an update is NaN and left out; all processes compute all metrics, or they would deadlock
        warnings.filterwarnings("ignore", ".*was called before the ``update`` method.*")
        for name, of_explainer in metrics.items():
            kept = image_scores(of_explainer)
            results[name] = numbers(of_explainer, kept)
            measured = {key: values for key, values in kept.items() if key in results[name]}
            scores[name] = {key: values[order].float().cpu() for key, values in measured.items()}
    return results, ImageScores(index.long().cpu(), scores)
