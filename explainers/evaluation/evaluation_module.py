"""Measures explainers on a data set: the LightningModule of eval.py."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lightning import LightningModule
from torch import Tensor

from explainers.evaluation.measurement import Measurement, list_columns
from explainers.metrics.means import ImageScores


class EvaluationModule(Measurement, LightningModule):
    """Measures explainers in `Trainer.test`; afterwards `results` holds the numbers of each, `scores` those of images.

    For arguments see `Measurement`.
    """

    results: Mapping[str, dict[str, Any]] = MappingProxyType({})
    scores: ImageScores | None = None
    measured: Mapping[str, Any] = MappingProxyType({})

    @property
    def columns(self) -> dict[str, str]:
        """See `list_columns`."""
        return list_columns(self.settings)

    def identity(self) -> dict[str, Any]:
        """Identity of target and settings; after the test also `images`, `precision` and, with labels, `accuracy`."""
        return self.target.identity() | self.settings.identity() | {**self.measured}

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any] | None:
        """Measure a batch, unless an earlier command has measured it."""
        return None if batch_idx < self.batches else self.update(batch)

    def on_test_epoch_end(self) -> None:
        self.results, self.scores = self.summarise()
        measured = {"accuracy": self.accuracy.compute().item(), "images": len(self.scores.index)}
        known = {key: value for key, value in measured.items() if value == value}  # without NaN
        self.measured = known | {"precision": self.trainer.precision}
        logged = {f"{name}/{key}": value for name, row in self.results.items() for key, value in row.items()}
        logged = {key: value for key, value in (logged | known).items() if isinstance(value, float)}
        self.log_dict(logged, sync_dist=True)  # equal in all processes; without sync_dist Lightning would warn
