"""How faithful a trained explainer is, measured on a few images after the training."""

import json
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from callbacks.samples import collect_samples, get_explainer
from explainers.errors import InputError
from explainers.evaluation.result import CURVE_COLUMNS, measure_beside_baselines, text_table
from explainers.saved.files import write_atomically


class Check(Callback):
    """After a training, measures the fidelity of the explainer beside chance and a method without training.

    The first process does it alone. The numbers are printed, logged as `check/<explainer>/<number>`, and written to
    check.json with what was measured. With so few images, a standard error is about 0.03: eval.py measures in earnest.

    Args:
        folder: folder of check.json.
        images: number of images, evenly spaced in the validation set.
        levels: number of sparsities, including 0 and 1; 18 masked images for each image and explainer with 11.
        batch_size: images explained at a time.
    """

    def __init__(self, folder: str, images: int = 32, levels: int = 11, batch_size: int = 8) -> None:
        self.path = Path(folder) / "check.json"
        self.images = images
        self.levels = levels
        self.batch_size = batch_size
        self.batch: dict[str, Any] | None = None

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if batch_idx == 0:
            self.batch = batch

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if trainer.fast_dev_run:
            print("check: the fidelity is not measured in a fast_dev_run")
            return
        was_training = pl_module.training
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._check(trainer, pl_module.eval())
        except Exception as error:  # whatever it is: the trained weights are exported after this
            name = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
            print(f"check: the fidelity was not measured: {name}{' '.join(str(error).split())}")
        finally:
            pl_module.train(was_training)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        samples = collect_samples(trainer, self.batch, self.images)
        if samples is None:
            raise InputError("expected validation images, got none: set data.val, or callbacks.check=null")
        batches = samples["image"].split(self.batch_size)
        with trainer.precision_plugin.forward_context():
            measured = measure_beside_baselines(get_explainer(module), batches, self.levels)
        images = len(samples["image"])
        record = {"images": images, "levels": self.levels, "removal": "zero", "explainers": measured}
        write_atomically(self.path, json.dumps(record, indent=2))
        logged = {f"check/{name}/{key}": value for name, row in measured.items() for key, value in row.items()}
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=trainer.global_step)
        print(text_table(measured, CURVE_COLUMNS, f"{images} validation images"))
