"""Figures with the heatmaps of a few images."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from explainers.files import atomic


def draw_heatmaps(
    images: Tensor, heatmaps: Mapping[str, Tensor], truth: Tensor | None = None, titles: list[str] | None = None
) -> Figure:
    """Draw one row per image: the image with the object's outline, then each explainer's heatmap over the grey image.

    Red patches support the class and blue patches oppose it, relative to the median of the heatmap. Each heatmap has a
    colour scale of its own, symmetric around its median.

    Args:
        images: uint8, (B, 3, H, W).
        heatmaps: explainer's name → heatmaps (B, P, P).
        truth: True for pixels of the object, boolean (B, H, W); `None` draws no outlines.
        titles: label of each row.

    >>> images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    >>> len(draw_heatmaps(images, {"tve": torch.rand(2, 4, 4)}).axes)  # 2 rows of 2 columns
    4
    """
    columns = ["image", *heatmaps]
    figure = Figure(figsize=(1.7 * len(columns), 1.8 * len(images)), layout="constrained")
    axes = figure.subplots(len(images), len(columns), squeeze=False)
    for row, image in enumerate(images.cpu()):
        for axis, name in zip(axes[row], columns, strict=True):
            grey = image.float().mean(0).numpy() / 255
            axis.imshow(image.permute(1, 2, 0).numpy() if name == "image" else grey, cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title(fill(name, 24), fontsize=9)  # as many letters as a panel is wide
            if truth is not None and name == "image":
                axis.contour(truth[row].cpu().float().numpy(), levels=[0.5], colors="lime", linewidths=1)
        for axis, heatmap in zip(axes[row, 1:], heatmaps.values(), strict=True):
            _overlay(axis, heatmap[row].detach().float().cpu(), image.shape[-1])
        if titles is not None:
            axes[row, 0].set_ylabel(titles[row], fontsize=8)
    return figure


def _overlay(axis: Any, heatmap: Tensor, size: int) -> None:
    """Draw one heatmap (P, P) over an image whose side is `size` pixels."""
    centred = heatmap - heatmap.median()
    limit = float(centred.abs().quantile(0.99)) or 1.0
    pixels = F.interpolate(centred[None, None], (size, size), mode="nearest")[0, 0]
    axis.imshow(pixels.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, alpha=0.6)


def class_title(trainer: Any, pl_module: Any, index: int) -> str:
    """Name of a class of the explained model: as its head says, or as the data set does if it has the same number."""
    target, data = getattr(pl_module, "target", None), trainer.datamodule
    names = getattr(target, "classes", ()) or (data.class_names("test") if hasattr(data, "class_names") else ())
    return names[index] if len(names) == getattr(target, "num_classes", None) else f"class {index}"


class Heatmaps(Callback):
    """Draws heatmaps of the first images of the validation set at every validation, and of the test set at a test.

    In training, the module itself is the explainer. In a test, the module returns the heatmaps of its explainers. The
    figure is written to a PNG file and to the W&B logger, if there is one. In training, a batch without pixels is
    skipped.

    Args:
        folder: folder of the PNG file.
        name: name of the file, and of the panel in W&B.
        images: number of images.
    """

    def __init__(self, folder: str, name: str = "heatmaps", images: int = 6) -> None:
        self.folder, self.name, self.images = Path(folder), name, images

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx == 0 and trainer.is_global_zero and not trainer.sanity_checking and "image" in batch:
            images = batch["image"][: self.images]
            with torch.no_grad():
                heatmaps = pl_module(images)
            self._save(trainer, images, {type(pl_module).__name__: heatmaps}, batch.get("truth"), None)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx == 0 and trainer.is_global_zero and (outputs or {}).get("heatmaps"):
            chosen = {name: heatmaps[: self.images] for name, heatmaps in outputs["heatmaps"].items()}
            titles = [class_title(trainer, pl_module, index) for index in outputs["classes"].tolist()]
            self._save(trainer, batch["image"][: self.images], chosen, batch.get("truth"), titles)

    def _save(
        self,
        trainer: Trainer,
        images: Tensor,
        heatmaps: dict[str, Tensor],
        truth: Tensor | None,
        titles: list[str] | None,
    ) -> None:
        """Draw a figure, and write it to the file and to the loggers that take images."""
        figure = draw_heatmaps(images, heatmaps, truth, titles)
        path = self.folder / f"{self.name}.png"
        with atomic(path) as unfinished:
            figure.savefig(unfinished, dpi=120)
        for logger in trainer.loggers:
            if hasattr(logger, "log_image"):
                logger.log_image(key=self.name, images=[str(path)])
