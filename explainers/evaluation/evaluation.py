"""Measures explainers of one target on the same images, classes and perturbations."""

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import SumMetric

from explainers import SelfExplainer
from explainers.errors import InputError, check_range, checks_choices
from explainers.evaluation.checks import check_heatmaps, check_target
from explainers.evaluation.passes import counted_passes, forward_passes, passes_taken
from explainers.evaluation.probes import Explained, Probe, Probes
from explainers.evaluation.sweep import Order, Sweep
from explainers.masking import PatchGrid, Removal
from explainers.metrics.accuracy import Accuracy
from explainers.metrics.agreement import Agreement, MeanOfImages, agreement_metrics
from explainers.metrics.cost import Cost, Passes
from explainers.metrics.curves import Curve, needed_sides
from explainers.metrics.localization import Localization, Localized
from explainers.metrics.perturbation import PerturbationCurves
from explainers.target import TargetModel
from explainers.target.inputs import check_labels


class Evaluation(LightningModule):
    """Measures explainers in `Trainer.test`; afterwards `results` holds a dictionary of numbers for each of them.

    It measures the curves of a perturbation sweep, and `probes`; the localization of objects, if the data set has
    them; the agreement with the explainer named `reference`, if there is one; the accuracy of explainers that are
    classifiers, on labelled images; the forward passes of the target for each image, the explained images per second of
    one process, without the first batch, and on GPUs the peak memory.

    With several removals, the numbers of the first have the names of their curves; those of the others have the name of
    the removal at their end, such as `fidelity_plus_black`.

    Args:
        target: the model to explain and to perturb.
        grid: the patches that are explained and removed.
        explainers: name → explainer of this target on this grid.
        curves: names of `CURVES`, all read off one sweep; none leaves the sweep out.
        levels: number of sparsities on the curves, including 0 and 1; at least 2.
        removals: what replaces removed patches, see `Removal`; one sweep for each.
        order: remove `patches` or `pixels`, see `Sweep`.
        empty: whether the areas include the level at which nothing is visible, see `PerturbationCurves`.
        probes: checks that need further passes, see `Probes`; with the first removal, of patches.
        localization: metrics of the objects' locations, see `Localization`; left out where the data set has none.
        classes: explain the `predicted` class of each image, or its `label`.
        reference: name of the explainer to compare the others with; `None` compares with none.
        agreement: metrics of the comparison; `e_rmse` requires that all explainers have the same units.
        k: K of `iou`, which is IoU@K; at most the number of patches.
        measured: names of the explainers to measure; `None` measures all. The reference may be none of them.
        chunk_size: maximum number of masked images in memory.
    """

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        explainers: Mapping[str, nn.Module],
        curves: Sequence[Curve] = ("fidelity_plus", "fidelity_minus", "relevance_gain"),
        levels: int = 21,
        removals: Sequence[Removal] = ("zero",),
        order: Order = "patches",
        empty: bool = True,
        probes: Sequence[Probe] = (),
        localization: Sequence[Localized] = ("pointing_game",),
        classes: Literal["predicted", "label"] = "predicted",
        reference: str | None = None,
        agreement: Sequence[Agreement] = ("rank_correlation",),
        k: int = 10,
        measured: Sequence[str] | None = None,
        chunk_size: int = 256,
    ) -> None:
        super().__init__()
        check_target(target, grid)
        if "iou" in agreement:
            check_range(1, grid.num_patches, k=k)
        if reference is not None and reference not in explainers:
            raise InputError(
                f"expected reference to be one of the explainers {', '.join(explainers)}, got {reference}: add it to"
                " them, or compare with none (evaluation.reference=null)"
            )
        if not removals:
            raise InputError("expected removals, one or more, such as [zero, black], got none")
        self.target, self.grid = target.eval(), grid
        # A dictionary beside a list of modules, because an nn.ModuleDict refuses some names
        self.explainers = {name: explainer.eval() for name, explainer in explainers.items()}
        self.parts = nn.ModuleList(self.explainers.values())
        settings = levels, order, chunk_size, needed_sides(curves)
        self.sweeps = [Sweep(target, grid, removal, *settings) for removal in removals if curves]
        self.probes = Probes(probes, Sweep(target, grid, removals[0], levels, chunk_size=chunk_size))
        self.curves, self.levels, self.removals, self.order, self.empty = curves, levels, removals, order, empty
        self.localization, self.classes, self.reference = localization, classes, reference
        self.agreement, self.k = agreement, k
        self.names = list(explainers if measured is None else measured)
        self.metrics = nn.ModuleList(nn.ModuleDict(self._metrics()) for _ in self.names)
        self.accuracy, self.images = Accuracy(), SumMetric()
        self.results: dict[str, dict[str, Any]] = {}
        self.measured: dict[str, Any] = {}
        self.batches = 0
        """Number of batches that this process has measured; a batch of an earlier number is skipped."""

    @property
    def columns(self) -> dict[str, str]:
        """Column titles of the numbers in `results` that tables show."""
        titles: dict[str, str] = {}
        for name, metric in self._metrics().items():
            titles |= metric.columns if hasattr(metric, "columns") else {name: metric.column}
        return titles

    @property
    def forward_passes(self) -> dict[str, int]:
        """Forward passes of the target for each image, by explainer, for all `perturbations`, and to explain again."""
        shared, each = self.probes.forward_passes
        masked = (sum(sweep.forward_passes for sweep in self.sweeps) + each) * len(self.names) + shared
        passes = forward_passes(self.explainers)
        probed = [passes[name] for name in self.names if getattr(self.explainers[name], "timed", True)]
        again = self.probes.explanations * sum(probed)
        return passes | {"perturbations": 1 + masked} | ({"explanations of probes": again} if again else {})

    def _metrics(self) -> dict[str, Any]:
        """New metrics of one explainer, in the order of the columns."""
        curves = {
            f"curves_{sweep.removal}": PerturbationCurves(
                sweep.grid.num_patches, self.curves, self.levels, self.empty, sweep.removal if number else ""
            )
            for number, sweep in enumerate(self.sweeps)
        }
        agreement = agreement_metrics(self.k)
        others = {"localization": Localization(self.localization), "accuracy": Accuracy()}
        compared: dict[str, Any] = {name: agreement[name] for name in self.agreement}
        return {**curves, **self.probes.metrics(), **others, **compared, "cost": Cost(), "forward_passes": Passes()}

    def _metrics_of(self, explainer: str) -> Any:
        """The metrics of one explainer, by name."""
        return self.metrics[self.names.index(explainer)]

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any] | None:
        if batch_idx < self.batches:
            return None
        images, normalised = batch["image"], self.target.normalise(batch["image"])
        logits = self.target.classify(self.target.embed(normalised))
        predicted = logits.argmax(-1)
        self.accuracy.update(predicted, batch["label"])
        self.images.update(len(images))
        if self.classes == "label":
            check_labels(batch["label"], self.target.num_classes, "evaluation.classes=predicted")
        classes = predicted if self.classes == "predicted" else batch["label"]
        heatmaps = {name: self._heatmaps(name, images, classes, batch_idx) for name in self.explainers}
        for sweep in self.sweeps:
            ends = torch.stack([logits, sweep.empty(normalised).expand_as(logits)], 1)
            for name in self.names:
                outputs = sweep(normalised, heatmaps[name], batch["index"], classes, batch["label"], ends)
                self._metrics_of(name)[f"curves_{sweep.removal}"].update(outputs)
        given = Explained(
            images, normalised, batch["index"], classes, logits.softmax(-1).gather(-1, classes[:, None])[:, 0]
        )
        subsets = self.probes.subsets(given) if self.probes.shares else None
        for name in self.names:
            self.probes.update(self._metrics_of(name), self.explainers[name], heatmaps[name], given, subsets)
            self._update(name, batch, heatmaps)
        self.batches = batch_idx + 1
        return {"heatmaps": heatmaps, "classes": classes, "logits": logits}

    def _heatmaps(self, name: str, images: Tensor, classes: Tensor, batch_idx: int) -> Tensor:
        """The heatmaps of one explainer, timed."""
        explainer = self.explainers[name]
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        start = self._now()
        with counted_passes(self.target, explainer) as count:
            heatmaps = explainer(images, classes)
        seconds = self._now() - start
        if name in self.names:
            self._metrics_of(name)["forward_passes"].update(len(images), passes_taken(explainer, count, len(images)))
        if name in self.names and batch_idx > 0 and getattr(explainer, "timed", True):
            memory = torch.cuda.max_memory_allocated(self.device) / 1e9 if self.device.type == "cuda" else 0.0
            self._metrics_of(name)["cost"].update(len(images), seconds, memory)
        check_heatmaps(name, heatmaps, images, self.grid)
        return heatmaps

    def _update(self, name: str, batch: dict[str, Tensor], heatmaps: Mapping[str, Tensor]) -> None:
        """Update the metrics of one explainer that need no masked images."""
        metrics, explainer = self._metrics_of(name), self.explainers[name]
        if isinstance(explainer, SelfExplainer):
            metrics["accuracy"].update(explainer.logits(batch["image"]).argmax(-1), batch["label"])
        if "truth" in batch:
            metrics["localization"].update(heatmaps[name], batch["truth"])
        if self.reference not in (None, name):
            for metric in self.agreement:
                metrics[metric].update(heatmaps[name], heatmaps[str(self.reference)])

    def _now(self) -> float:
        """Seconds, after the GPU has finished its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def on_test_epoch_end(self) -> None:
        with warnings.catch_warnings():
            # A metric without an update is NaN and left out; all processes compute all metrics, or they would deadlock
            warnings.filterwarnings("ignore", ".*was called before the ``update`` method.*")
            self.results = {name: self._numbers(name) for name in self.names}
            measured = {"accuracy": self.accuracy.compute().item(), "images": int(self.images.compute())}
        self.measured = {key: value for key, value in measured.items() if value == value}  # without NaN
        self.measured |= {"precision": self.trainer.precision}
        logged = {f"{name}/{key}": value for name, row in self.results.items() for key, value in row.items()}
        logged = {key: value for key, value in (logged | self.measured).items() if isinstance(value, float)}
        self.log_dict(logged, sync_dist=True)  # equal in all processes; without sync_dist Lightning would warn

    def _numbers(self, name: str) -> dict[str, Any]:
        """What was measured of one explainer."""
        numbers: dict[str, Any] = {}
        for key, metric in self._metrics_of(name).items():
            value = metric.compute()
            numbers |= {
                part: number.tolist() for part, number in (value if isinstance(value, dict) else {key: value}).items()
            }
            if isinstance(metric, MeanOfImages):
                numbers[f"{key}_error"] = metric.standard_error().item()
        if getattr(self.explainers[name], "ignores_classes", False):
            numbers["ignores_classes"] = True
        return {key: value for key, value in numbers.items() if value == value}  # without NaN

    def identity(self) -> dict[str, Any]:
        """The settings that the results depend on; results are comparable only if all of these are equal.

        The `reference` is missing if there is none. After the test, it includes the `precision` and the number of
        `images`, and the target's `accuracy` if some of them have labels.
        """
        compared = {} if self.reference is None else {"reference": self.reference}
        return {
            **self.target.identity(),
            "image_size": self.grid.image_size,
            "patches_per_side": self.grid.side,
            "removals": list(self.removals),
            "order": self.order,
            "levels": self.levels,
            "empty": self.empty,
            "probes": list(self.probes.names),
            "classes": self.classes,
            **compared,
            **self.measured,
        }
