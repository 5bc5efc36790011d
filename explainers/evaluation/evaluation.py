"""Measures explainers of one target on the same images, classes and perturbations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import torch
from lightning import LightningModule
from torch import Tensor, nn

from explainers import Details, Explainer, SelfExplainer
from explainers.errors import InputError, check_choices, check_positive, check_range
from explainers.evaluation.checks import check_heatmaps, check_reference, check_target
from explainers.evaluation.passes import explain, forward_passes, modules_of
from explainers.evaluation.probes import PROBES, ExplainedBatch, Probe, Probes
from explainers.evaluation.summary import Indices, summary
from explainers.evaluation.sweep import Order, Sweep, ranked
from explainers.masking import PatchGrid, Removal, level_sizes
from explainers.metrics.accuracy import Accuracy
from explainers.metrics.agreement import AGREEMENTS, Agreement, agreement_metrics
from explainers.metrics.cost import Cost, Passes
from explainers.metrics.curves import Curve, needed_sides
from explainers.metrics.localization import LOCALIZATIONS, Localization, Localized
from explainers.metrics.numbers import NUMBERS, Numbers
from explainers.metrics.perturbation import PerturbationCurves, curve_columns
from explainers.models import TargetModel
from explainers.models.inputs import check_labels
from explainers.results.scores import ImageScores


@dataclass(frozen=True)
class Evaluation:
    """What is measured of every explainer, and how; called with a target and its explainers, it gives the module.

    With several removals, the numbers of the first are named after their curves; those of the others are suffixed with
    the removal, such as `fidelity_plus_black`.

    Args:
        grid: the patches that are explained and removed.
        curves: names of `CURVES`, all computed from one sweep; an empty list leaves the sweep out.
        levels: number of sparsities on the curves, including 0 and `until`; at least 2.
        until: the largest sparsity on the curves, see `PerturbationCurves`.
        removals: what replaces removed patches, see `Removal`; one sweep for each.
        order: remove `patches`, `pixels`, or pixels in the order of `saliency` maps, see `Order`.
        empty: whether the areas include the level at which nothing is visible, see `PerturbationCurves`.
        probes: checks that need further passes, see `Probes`; they use the first removal, of patches.
        localization: metrics of the objects' locations, see `Localization`; left out where the data set has none.
        classes: explain the `predicted` class of each image, or its `label`.
        reference: name of the explainer that the others are compared with; `None` compares with none.
        agreement: metrics of the comparison; `e_rmse` requires that all explainers have the same units.
        k: K of `iou`, which is IoU@K; at most the number of patches.
        chunk_size: maximum number of masked images in memory.
    """

    grid: PatchGrid = PatchGrid()
    curves: Sequence[Curve] = ("fidelity_plus", "fidelity_minus", "relevance_gain")
    levels: int = 21
    until: float = 1.0
    removals: Sequence[Removal] = ("zero",)
    order: Order = "patches"
    empty: bool = True
    probes: Sequence[Probe] = ()
    localization: Sequence[Localized] = ("pointing_game",)
    classes: Literal["predicted", "label"] = "predicted"
    reference: str | None = None
    agreement: Sequence[Agreement] = ("rank_correlation",)
    k: int = 10
    chunk_size: int = 256

    def __post_init__(self) -> None:
        check_choices(vars(self), get_type_hints(Evaluation))
        level_sizes(self.grid.num_patches, self.levels, self.until)  # checks both
        check_positive(chunk_size=self.chunk_size)
        if "iou" in self.agreement:
            check_range(1, self.grid.num_patches, k=self.k)
        if not self.removals:
            raise InputError("expected removals, one or more, such as [zero, black], got none")

    def __call__(
        self, target: TargetModel, explainers: Mapping[str, Explainer], measured: Sequence[str] | None = None
    ) -> "EvaluationModule":
        """The module that measures these explainers; its arguments are those of `EvaluationModule`."""
        return EvaluationModule(target, explainers, self, measured)

    @property
    def columns(self) -> dict[str, str]:
        """Number in results → title of its column in tables, in the order of the columns."""
        titles: dict[str, str] = {}
        for position, removal in enumerate(self.removals if self.curves else ()):
            titles |= curve_columns(self.curves, removal if position else "")
        titles |= {name: PROBES[name].column for name in self.probes}
        titles |= {key: title for name in self.localization for key, title in LOCALIZATIONS[name].columns.items()}
        agreement = {name: AGREEMENTS[name].column.format(k=self.k) for name in self.agreement}
        titles |= {"accuracy": Accuracy.column} | agreement
        return titles | NUMBERS | Cost.columns | {"forward_passes": Passes.column}

    def metrics(self) -> dict[str, Any]:
        """New metrics of one explainer."""
        patches = self.grid if self.order == "patches" else PatchGrid(self.grid.image_size, 1)
        of_sweep = patches.num_patches, self.curves, self.levels, self.empty
        curves = {
            f"curves_{removal}": PerturbationCurves(*of_sweep, removal if position else "", self.until)
            for position, removal in enumerate(self.removals if self.curves else ())
        }
        probes: dict[str, Any] = {name: PROBES[name]() for name in self.probes}
        others = {"localization": Localization(self.localization), "accuracy": Accuracy(), "numbers": Numbers()}
        agreement: dict[str, Any] = {name: agreement_metrics(self.k)[name] for name in self.agreement}
        return {**curves, **probes, **others, **agreement, "cost": Cost(), "forward_passes": Passes()}

    def identity(self) -> dict[str, Any]:
        """The settings that numbers of one name depend on; results are comparable only if all of these are equal."""
        compared: dict[str, Any] = {} if self.reference is None else {"reference": self.reference}
        return {
            "image_size": self.grid.image_size,
            "patches_per_side": self.grid.side,
            "removals": list(self.removals),
            "order": self.order,
            "levels": self.levels,
            "until": self.until,
            "empty": self.empty,
            "probes": list(self.probes),
            "classes": self.classes,
            **compared,
        }


class EvaluationModule(LightningModule):
    """Measures explainers in `Trainer.test`; afterwards `results` holds the numbers of each, `scores` those of images.

    Besides what its settings name, it measures the accuracy of explainers that are classifiers, on labelled images; the
    forward passes of the target for each image; the explained images per second of one process, without the first
    batch; and on GPUs the peak memory.

    Args:
        target: the model to explain and to perturb.
        explainers: name → explainer of this target, on the grid of the settings.
        settings: what is measured.
        measured: names of the explainers to measure; `None` measures all. The reference may be none of them.
    """

    def __init__(
        self,
        target: TargetModel,
        explainers: Mapping[str, Explainer],
        settings: Evaluation,
        measured: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_target(target, settings.grid)
        check_reference(settings.reference, explainers)
        self.target = target.eval()
        self.settings = settings
        self.columns = settings.columns
        # A dictionary beside a list of modules, because an nn.ModuleDict refuses some names
        self.explainers = dict(explainers)
        self.parts = modules_of(explainers.values()).eval()
        self.names = list(explainers if measured is None else measured)
        self.sweeps = [self._sweep(removal, settings.order) for removal in settings.removals if settings.curves]
        self.probes = Probes(settings.probes, self._sweep(settings.removals[0], "patches"))
        self.metrics = nn.ModuleList(nn.ModuleDict(settings.metrics()) for _ in self.names)
        self.accuracy = Accuracy()
        self.index = Indices()
        self.results: dict[str, dict[str, Any]] = {}
        self.scores: ImageScores | None = None
        self.measured: dict[str, Any] = {}
        self.batches = 0
        """Number of batches that this process has measured; a batch of an earlier number is skipped."""

    def _sweep(self, removal: Removal, order: Order) -> Sweep:
        own = self.settings
        sides = needed_sides(own.curves)
        return Sweep(self.target, own.grid, removal, own.levels, order, own.chunk_size, sides, own.until)

    @property
    def forward_passes(self) -> dict[str, int]:
        """Forward passes of the target for each image, by explainer, for all `perturbations`, and to explain again."""
        shared, each = self.probes.forward_passes
        masked = (sum(sweep.forward_passes for sweep in self.sweeps) + each) * len(self.names) + shared
        passes = forward_passes(self.explainers)
        probed = [passes[name] for name in self.names if getattr(self.explainers[name], "timed", True)]
        again = self.probes.explanations * sum(probed)
        return passes | {"perturbations": 1 + masked} | ({"explanations of probes": again} if again else {})

    def identity(self) -> dict[str, Any]:
        """Identity of target and settings; after the test also `images`, `precision` and, with labels, `accuracy`."""
        return self.target.identity() | self.settings.identity() | self.measured

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any] | None:
        if batch_idx < self.batches:
            return None
        normalised = self.target.normalise(batch["image"])
        logits = self.target.classify(self.target.embed(normalised))
        predicted = logits.argmax(-1)
        self.accuracy.update(predicted, batch["label"])
        self.index.update(batch["index"])
        if self.settings.classes == "label":
            check_labels(batch["label"], self.target.num_classes, "evaluation.classes=predicted")
        classes = predicted if self.settings.classes == "predicted" else batch["label"]
        explained = {name: self._explain(name, batch["image"], classes, batch_idx > 0) for name in self.explainers}
        for sweep in self.sweeps:
            ends = torch.stack([logits, sweep.empty(normalised).expand_as(logits)], 1)
            for name, metrics in self._metrics():
                scores = ranked(explained[name], sweep.order)
                outputs = sweep(normalised, scores, batch["index"], classes, batch["label"], ends)
                metrics[f"curves_{sweep.removal}"].update(outputs)
        probabilities = logits.softmax(-1).gather(-1, classes[:, None])[:, 0]
        given = ExplainedBatch(batch["image"], normalised, batch["index"], classes, probabilities)
        subsets = self.probes.subsets(given)
        for name, metrics in self._metrics():
            self.probes.update(metrics, self.explainers[name], explained[name].heatmaps, given, subsets)
            self._update(name, metrics, batch, explained)
        self.batches = batch_idx + 1
        return {"heatmaps": {name: of.heatmaps for name, of in explained.items()}, "classes": classes, "logits": logits}

    def _metrics(self) -> list[tuple[str, Any]]:
        """The name and the metrics of every measured explainer."""
        return list(zip(self.names, self.metrics, strict=True))

    def _explain(self, name: str, images: Tensor, classes: Tensor, timed: bool) -> Details:
        """The explanation of one explainer; if it is measured, the metrics of its cost and numbers are updated."""
        explainer = self.explainers[name]
        explanation, passes, seconds, memory = explain(explainer, self.target, images, classes)
        check_heatmaps(name, explanation.heatmaps, images, self.settings.grid)
        if name in self.names:
            metrics = dict(self._metrics())[name]
            metrics["numbers"].add(explanation.numbers)
            metrics["forward_passes"].update(len(images), passes)
            if timed and getattr(explainer, "timed", True):
                metrics["cost"].update(len(images), seconds, memory)
        return explanation

    def _update(self, name: str, metrics: Any, batch: dict[str, Tensor], explained: Mapping[str, Details]) -> None:
        """Update the metrics of one explainer that need no masked images."""
        if isinstance(explainer := self.explainers[name], SelfExplainer):
            metrics["accuracy"].update(explainer.logits(batch["image"]).argmax(-1), batch["label"])
        if "truth" in batch:
            metrics["localization"].update(ranked(explained[name], self.settings.order), batch["truth"])
        reference = self.settings.reference
        if reference is not None and reference != name:
            for metric in self.settings.agreement:
                metrics[metric].update(explained[name].heatmaps, explained[reference].heatmaps)

    def on_test_epoch_end(self) -> None:
        self.results, self.scores = summary(dict(self._metrics()), self.index, self.explainers)
        measured = {"accuracy": self.accuracy.compute().item(), "images": len(self.scores.index)}
        self.measured = {key: value for key, value in measured.items() if value == value}  # without NaN
        self.measured |= {"precision": self.trainer.precision}
        logged = {f"{name}/{key}": value for name, row in self.results.items() for key, value in row.items()}
        logged = {key: value for key, value in (logged | self.measured).items() if isinstance(value, float)}
        self.log_dict(logged, sync_dist=True)  # equal in all processes; without sync_dist Lightning would warn
