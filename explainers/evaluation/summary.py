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


def summary(
    metrics: Mapping[str, Any], indices: Indices, explainers: Mapping[str, object]
) -> tuple[dict[str, dict[str, Any]], ImageScores]:
    """Compute the numbers of each explainer, and those of single images in the order of the data set.

    Every process has to call this function, because the metrics of all processes are joined.

    Args:
        metrics: explainer → its metrics by name.
        indices: the images.
        explainers: the explainers by their names; those that depend on no class are marked in their numbers.
    """
    index, order = indices.scores("index")["index"].sort()
    results, scores = {}, {}
    with warnings.catch_warnings():
        # A metric without an update is NaN and left out; all processes compute all metrics, or they would deadlock
        warnings.filterwarnings("ignore", ".*was called before the ``update`` method.*")
        for name, of_explainer in metrics.items():
            kept = image_scores(of_explainer)
            results[name] = numbers(of_explainer, kept)
            results[name] |= {"ignores_classes": True} if getattr(explainers[name], "ignores_classes", False) else {}
            aligned = {key: values for key, values in kept.items() if len(values) == len(order)}
            scores[name] = {key: aligned[key][order].float().cpu() for key in aligned.keys() & results[name].keys()}
    return results, ImageScores(index.long().cpu(), scores)
