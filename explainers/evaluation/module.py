"""Measures explainers of one target on the same images, classes and perturbations."""

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric

from explainers import SelfExplainer, forward_passes
from explainers.errors import InputError, check_positive, check_range, checks_choices
from explainers.evaluation.checks import check_heatmaps, check_target
from explainers.inputs import check_labels
from explainers.masking import PatchGrid, Removal
from explainers.metrics.accuracy import Accuracy
from explainers.metrics.agreement import Agreement, MeanOfImages, agreement_metrics
from explainers.metrics.localization import PointingGame
from explainers.metrics.perturbation import Fidelity, perturbation_sweep
from explainers.removal import check_removal, masked_probabilities
from explainers.target import TargetModel


class Evaluation(LightningModule):
    """Measures explainers in `Trainer.test`; afterwards `results` holds a dictionary of numbers for each of them.

    It measures Fidelity⁺ and Fidelity⁻; the hit rate of the pointing game, if the data set has object locations; the
    agreement with the explainer named `reference`, if there is one; the accuracy of explainers that are classifiers, on
    labelled images; and the explained images per second of one process, without the first batch.

    Args:
        target: the model to explain and to perturb.
        grid: the patches that are explained and removed.
        explainers: name → explainer of this target on this grid.
        levels: number of sparsities on the curves, including 0 and 1; at least 2.
        removal: what replaces removed patches, see `Removal`.
        classes: explain the `predicted` class of each image, or its `label`.
        reference: name of the explainer to compare the others with; `None` compares with none.
        agreement: metrics of the comparison; `e_rmse` requires that all explainers have the same units.
        k: K of `iou`, which is IoU@K; at most the number of patches.
        chunk_size: maximum number of masked images in memory.
    """

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        explainers: Mapping[str, nn.Module],
        levels: int = 21,
        removal: Removal = "zero",
        classes: Literal["predicted", "label"] = "predicted",
        reference: str | None = None,
        agreement: Sequence[Agreement] = ("rank_correlation",),
        k: int = 10,
        chunk_size: int = 256,
    ) -> None:
        super().__init__()
        check_target(target)
        check_removal(target, removal)
        check_range(2, levels=levels)
        check_positive(chunk_size=chunk_size)
        if "iou" in agreement:
            check_range(1, grid.num_patches, k=k)
        if reference is not None and reference not in explainers:
            raise InputError(
                f"expected reference to be one of the explainers {', '.join(explainers)}, got {reference}: add it to"
                " them, or compare with none (evaluation.reference=null)"
            )
        self.target, self.grid = target.eval(), grid
        # A dictionary beside a list of modules, because an nn.ModuleDict refuses some names
        self.explainers = {name: explainer.eval() for name, explainer in explainers.items()}
        self.parts = nn.ModuleList(self.explainers.values())
        self.levels, self.removal, self.classes = levels, removal, classes
        self.reference, self.agreement, self.k, self.chunk_size = reference, agreement, k, chunk_size
        self.metrics = nn.ModuleList(nn.ModuleDict(self._metrics()) for _ in explainers)
        self.accuracy, self.images = Accuracy(), SumMetric()
        self.results: dict[str, dict[str, Any]] = {}
        self.measured: dict[str, float] = {}

    @property
    def columns(self) -> dict[str, str]:
        """Column titles of the numbers in `results` that tables show."""
        agreement = {name: metric.column for name, metric in self._agreement().items()}
        return {
            **Fidelity.columns,
            "pointing_game": PointingGame.column,
            "accuracy": Accuracy.column,
            **agreement,
            "images_per_second": "Images/s ↑",
        }

    @property
    def forward_passes(self) -> dict[str, int]:
        """Forward passes of the target for each image, by explainer, and for all `perturbations`."""
        return forward_passes(self.explainers) | {"perturbations": 1 + (2 * self.levels - 2) * len(self.explainers)}

    def _agreement(self) -> dict[str, Any]:
        metrics = agreement_metrics(self.k)
        return {name: metrics[name] for name in self.agreement}

    def _metrics(self) -> dict[str, Metric]:
        return self._agreement() | {
            "accuracy": Accuracy(),
            "fidelity": Fidelity(self.grid.num_patches, self.levels),
            "pointing_game": PointingGame(),
            "seconds": SumMetric(),
            "timed_images": SumMetric(),
        }

    def _metrics_of(self, explainer: str) -> Any:
        """The metrics of one explainer, by name."""
        return self.metrics[list(self.explainers).index(explainer)]

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        images, normalised = batch["image"], self.target.normalise(batch["image"])
        predicted = self.target.classify(self.target.embed(normalised)).argmax(-1)
        self.accuracy.update(predicted, batch["label"])
        self.images.update(len(images))
        if self.classes == "label":
            check_labels(batch["label"], self.target.num_classes, "evaluation.classes=predicted")
        classes = predicted if self.classes == "predicted" else batch["label"]
        heatmaps = {}
        for name, explainer in self.explainers.items():
            metrics = self._metrics_of(name)
            start = self._now()
            heatmaps[name] = explainer(images, classes)
            if batch_idx > 0 and getattr(explainer, "timed", True):
                metrics["seconds"].update(self._now() - start)
                metrics["timed_images"].update(len(images))
            check_heatmaps(name, heatmaps[name], images, self.grid)
            metrics["fidelity"].update(*self._sweep(normalised, heatmaps[name], classes))
            if isinstance(explainer, SelfExplainer):
                metrics["accuracy"].update(explainer.logits(images).argmax(-1), batch["label"])
            if "truth" in batch:
                metrics["pointing_game"].update(heatmaps[name], batch["truth"])
        if self.reference is not None:
            for name in heatmaps.keys() - {self.reference}:
                for metric in self.agreement:
                    self._metrics_of(name)[metric].update(heatmaps[name], heatmaps[self.reference])
        return {"heatmaps": heatmaps, "classes": classes}

    def _sweep(self, normalised: Tensor, heatmaps: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """`perturbation_sweep` of the target, with this evaluation's settings."""

        def predict(keep: Tensor) -> Tensor:
            return masked_probabilities(self.target, normalised, keep, self.grid, self.removal, self.chunk_size)

        return perturbation_sweep(predict, heatmaps.flatten(1), classes, self.levels)

    def _now(self) -> float:
        """Seconds, after the GPU has finished its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def on_test_epoch_end(self) -> None:
        with warnings.catch_warnings():
            # A metric without an update is NaN and left out; all processes compute all metrics, or they would deadlock
            warnings.filterwarnings("ignore", ".*was called before the ``update`` method.*")
            self.results = {name: self._numbers(name) for name in self.explainers}
            measured = {"accuracy": self.accuracy.compute().item(), "images": int(self.images.compute())}
        self.measured = {key: value for key, value in measured.items() if value == value}  # without NaN
        logged = {f"{name}/{key}": value for name, row in self.results.items() for key, value in row.items()}
        logged = {key: value for key, value in (logged | self.measured).items() if isinstance(value, float)}
        self.log_dict(logged, sync_dist=True)  # equal in all processes; without sync_dist Lightning would warn

    def _numbers(self, name: str) -> dict[str, Any]:
        """What was measured of one explainer."""
        metrics = self._metrics_of(name)
        numbers = {key: value.tolist() for key, value in metrics["fidelity"].compute().items()}
        numbers |= {key: metrics[key].compute().item() for key in ("accuracy", "pointing_game", *self.agreement)}
        errors = {key: metrics[key] for key in self.agreement if isinstance(metrics[key], MeanOfImages)}
        numbers |= {f"{key}_error": metric.standard_error().item() for key, metric in errors.items()}
        numbers["images_per_second"] = (metrics["timed_images"].compute() / metrics["seconds"].compute()).item()
        if getattr(self.explainers[name], "ignores_classes", False):
            numbers["ignores_classes"] = True
        return {key: value for key, value in numbers.items() if value == value}  # without NaN

    def identity(self) -> dict[str, Any]:
        """The settings that the results depend on; results are comparable only if all of these are equal.

        After the test, it includes the number of `images`, and the target's `accuracy` if some of them have labels.
        """
        return {
            **self.target.identity(),
            "patches_per_side": self.grid.side,
            "removal": self.removal,
            "levels": self.levels,
            "classes": self.classes,
            **self.measured,
        }
