"""Figures with the heatmaps of a few images, while an explainer is trained."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from callbacks.samples import collect_samples, get_explainer
from explainers.errors import InputError
from explainers.evaluation.result import explain_by_baselines
from explainers.report.heatmap_figure import draw_heatmaps
from explainers.saved.files import atomic


class Heatmaps(Callback):
    """Draws heatmaps of validation images, beside chance and a method without training, at validations.

    The figure is written to a PNG file, and logged to W&B if there is such a logger. The images are evenly spaced in
    the validation set. The last figure shows the trained explainer.

    Args:
        folder: folder of the PNG file.
        name: name of the file, and of the panel in W&B.
        images: number of images.
        seconds: least time between two figures of a training.
    """

    def __init__(self, folder: str, name: str = "heatmaps", images: int = 6, seconds: float = 30) -> None:
        self.folder = Path(folder)
        self.name = name
        self.images = images
        self.seconds = seconds
        self.compared: dict[str, Tensor] | None = None
        self.signed: dict[str, bool | None] = {}
        self.batch: dict[str, Any] | None = None
        self.drawn = -math.inf  # when
        self.step = -1  # of the last figure

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if batch_idx == 0 and not trainer.sanity_checking:
            self.batch = batch
            if time.monotonic() - self.drawn >= self.seconds:
                self._draw(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.step != trainer.global_step:
            was_training = pl_module.training
            self._draw(trainer, pl_module.eval())
            pl_module.train(was_training)

    def _draw(self, trainer: Any, module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        with torch.inference_mode(False), torch.no_grad(), trainer.precision_plugin.forward_context():
            samples = collect_samples(trainer, self.batch, self.images)
            if samples is not None:  # batches of a cache without a data set have no images
                self._draw_samples(trainer, module, samples)
        self.drawn = time.monotonic()
        self.step = trainer.global_step

    def _draw_samples(self, trainer: Trainer, module: LightningModule, samples: dict[str, Any]) -> None:
        images = samples["image"].to(module.device)
        explainer = get_explainer(module)
        try:
            heatmaps = {type(explainer).__name__: module(images)}
        except InputError as error:
            if self.compared is None:
                print(f"heatmaps: not drawn: {error}")
            self.compared = {}
            return
        if self.compared is None:  # they stay as they are
            self.signed = {type(explainer).__name__: getattr(explainer, "signed", None)}
            self.compared = {}
            if hasattr(explainer, "target"):
                self.compared, signed = explain_by_baselines(explainer, images)
                self.signed |= signed
        figure = draw_heatmaps(images, heatmaps | self.compared, samples.get("truth"), signed=self.signed)
        path = self.folder / f"{self.name}.png"
        with atomic(path) as unfinished:
            figure.savefig(unfinished, dpi=120)
        for logger in trainer.loggers:
            if hasattr(logger, "log_image"):
                logger.log_image(key=self.name, images=[str(path)])
