"""What callbacks look at: the explainer that is trained, and validation images."""

from typing import Any

from lightning import Trainer
from torch.utils.data import default_collate


def get_explainer(module: Any) -> Any:
    """The explainer that a LightningModule trains; itself, if it is one."""
    return getattr(module, "explainer", module)


def collect_samples(trainer: Trainer, batch: dict[str, Any] | None, count: int) -> dict[str, Any] | None:
    """At most `count` evenly spaced validation images, as a batch, or `None`; without a data set, the first of a batch.

    Args:
        trainer: the trainer of a datamodule, whose batches may come from a cache without pixels.
        batch: a validation batch; `None` before the first one.
        count: maximum number of images.
    """
    data: Any = getattr(trainer, "datamodule", None)
    if hasattr(data, "dataset"):  # FFCV has none
        dataset = data.dataset("val")
        number = min(count, len(dataset))
        samples = [dataset[i * len(dataset) // number] for i in range(number)]
        readable = [sample for sample in samples if sample is not None]
        return default_collate(readable) if readable else None
    if batch is None or "image" not in batch:
        return None
    return {name: values[:count].clone() for name, values in batch.items()}  # gradients need no inference tensors
