"""What a trained explainer is shown beside, and on which images: chance, and a method without training."""

from typing import Any

from lightning import Trainer
from torch.utils.data import default_collate

from datamodules.datasets import spread
from explainers import posthoc
from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.target import TargetModel

FITTING = ("DecompX-SkipPLUS", "GradCAM", "IntegratedGradients")
"""Methods for transformers, for CNNs, and for any other model."""


def explainer_of(module: Any) -> Any:
    """The explainer that a LightningModule trains; itself, if it is one."""
    return getattr(module, "explainer", module)


def beside(target: TargetModel, grid: PatchGrid) -> dict[str, Any]:
    """Name → explainer: the first method of `FITTING` that explains the target on this grid, and chance."""
    chance = posthoc.build("Chance", target, grid)
    for method in FITTING:
        try:
            return {method: posthoc.build(method, target, grid), "chance": chance}
        except InputError:
            continue
    return {"chance": chance}


def validation_samples(trainer: Trainer, batch: dict[str, Any] | None, count: int) -> dict[str, Any] | None:
    """Samples that are evenly spaced in the validation set; of a datamodule without data sets, the first of a batch.

    Args:
        trainer: the trainer of a datamodule, whose batches may come from a cache without pixels.
        batch: a validation batch; `None` before the first one.
        count: maximum number of samples.

    Returns:
        A batch, or `None` if there are no images.
    """
    data: Any = getattr(trainer, "datamodule", None)
    if hasattr(data, "dataset"):
        samples = data.dataset("val")
        readable = [sample for index in spread(len(samples), count) if (sample := samples[index]) is not None]
        return default_collate(readable) if readable else None
    if batch is None or "image" not in batch:
        return None
    return {name: values[:count].clone() for name, values in batch.items()}  # gradients need no inference tensors
