"""How faithful a trained explainer is, measured on a few images after the training."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from callbacks.beside import beside, explainer_of, validation_samples
from explainers.app.benchmark import measure
from explainers.errors import InputError, check_positive, check_range
from explainers.report.labels import title_of
from explainers.saved.files import write_atomically

SHOWN = {"fidelity_plus": "Fidelity⁺ ↑", "fidelity_minus": "Fidelity⁻ ↓"}
"""Number in check.json → title of its column."""


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
        check_positive(images=images, batch_size=batch_size)
        check_range(3, levels=levels)
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

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
        samples = validation_samples(trainer, self.batch, self.images)
        if samples is None:
            raise InputError("expected validation images, got none: set data.val, or callbacks.check=null")
        explainer = explainer_of(module)
        compared = {type(explainer).__name__: explainer, **beside(explainer.target, explainer.grid)}
        batches = samples["image"].split(self.batch_size)
        with trainer.precision_plugin.forward_context():
            results, _ = measure(explainer.target, compared, batches, explainer.grid, self.levels)
        measured = {name: {key: float(row[key]) for key in _keys(row)} for name, row in results.items()}
        record = {"images": len(samples["image"]), "levels": self.levels, "removal": "zero", "explainers": measured}
        write_atomically(self.path, json.dumps(record, indent=2))
        logged = {f"check/{name}/{key}": value for name, row in measured.items() for key, value in row.items()}
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=trainer.global_step)
        print(table(measured, record["images"]))


def _keys(row: Mapping[str, Any]) -> list[str]:
    return [key for name in SHOWN for key in (name, f"{name}_error") if key in row]


def table(measured: Mapping[str, Mapping[str, float]], images: int) -> str:
    """The fidelities of explainers, with standard errors.

    >>> row = {"fidelity_plus": 0.51, "fidelity_plus_error": 0.02, "fidelity_minus": 0.1}
    >>> print(table({"anyhead": row}, images=32))
    32 validation images    Fidelity⁺ ↑    Fidelity⁻ ↓
    AnyHead                0.510 ± .020          0.100
    """
    lines = ["".join([f"{f'{images} validation images':20}", *(f"{title:>15}" for title in SHOWN.values())])]
    for name, row in measured.items():
        errors = [f" ± {row[f'{key}_error']:.3f}".replace("0.", ".") if f"{key}_error" in row else "" for key in SHOWN]
        cells = [f"{f'{row[key]:.3f}{error}':>15}" for key, error in zip(SHOWN, errors, strict=True)]
        lines.append("".join([f"{title_of(name):20}", *cells]))
    return "\n".join(lines)
