"""Figures with the heatmaps of a few images, while an explainer is trained."""

from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import default_collate

from explainers.report.heatmap_figure import draw_heatmaps
from explainers.saved.files import atomic


class Heatmaps(Callback):
    """Draws heatmaps of the first images of the validation set, at every validation; the module is the explainer.

    The figure is written to a PNG file, and logged to W&B if there is such a logger. If batches come from a cache,
    which has no pixels, the images are read from the data set.

    Args:
        folder: folder of the PNG file.
        name: name of the file, and of the panel in W&B.
        images: number of images.
    """

    def __init__(self, folder: str, name: str = "heatmaps", images: int = 6) -> None:
        self.folder = Path(folder)
        self.name = name
        self.images = images

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx > 0 or not trainer.is_global_zero or trainer.sanity_checking:
            return
        if "image" not in batch and not hasattr(getattr(trainer, "datamodule", None), "dataset"):
            return  # batches of a cache, without a data set to read images from
        images, truth = self._shown(trainer, batch)
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            heatmaps = pl_module(images.to(pl_module.device))
        figure = draw_heatmaps(images, {type(getattr(pl_module, "explainer", pl_module)).__name__: heatmaps}, truth)
        path = self.folder / f"{self.name}.png"
        with atomic(path) as unfinished:
            figure.savefig(unfinished, dpi=120)
        for logger in trainer.loggers:
            if hasattr(logger, "log_image"):
                logger.log_image(key=self.name, images=[str(path)])

    def _shown(self, trainer: Any, batch: Any) -> tuple[Tensor, Tensor | None]:
        """The first images, (B, C, H, W), and the pixels of their objects, (B, H, W), where they are known."""
        if "image" in batch:
            return batch["image"][: self.images], batch.get("truth")
        dataset = trainer.datamodule.dataset("val")
        samples = default_collate([dataset[index] for index in batch["index"][: self.images].tolist()])
        return samples["image"], samples.get("truth")
