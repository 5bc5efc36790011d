"""Measures explainers of one target on the same images, classes and perturbations."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from explainers import Details, Explainer, SelfExplainer
from explainers.errors import InputError
from explainers.evaluation.evaluation import Evaluation
from explainers.evaluation.passes import explain, find_modules, fit_heatmaps, forward_passes
from explainers.evaluation.probes import PROBES, Given
from explainers.evaluation.sweep import Sweep
from explainers.masking import PatchGrid
from explainers.metrics.agreement import AGREEMENTS, agreement_metrics
from explainers.metrics.cost import NUMBERS, Cost, Passes
from explainers.metrics.curves import CURVES, Curve
from explainers.metrics.localization import LOCALIZATIONS
from explainers.metrics.means import Accuracy, ImageScores, MeanOfValues, Metric, PerImage, collect_scores, numbers
from explainers.metrics.perturbation import PerturbationCurves, curve_columns
from explainers.models import TargetModel
from explainers.models.inputs import check_labels
from explainers.models.scores import check_probabilities
from explainers.runtime.modes import finest_dtype


def list_columns(settings: Evaluation) -> dict[str, str]:
    """Number in results → title of its column in tables, in the order of the columns."""
    titles: dict[str, str] = {}
    for position, removal in enumerate(settings.removals if settings.curves else ()):
        titles |= curve_columns(settings.curves, removal if position else "")
    titles |= {name: PROBES[name].column for name in settings.probes}
    titles |= {key: title for name in settings.localization for key, title in LOCALIZATIONS[name].columns.items()}
    agreement = {name: AGREEMENTS[name].column.format(k=settings.k) for name in settings.agreement}
    titles |= {"accuracy": Accuracy.column} | agreement
    return titles | NUMBERS | Cost.columns | {"forward_passes": Passes.column}


def build_metrics(settings: Evaluation) -> dict[str, Any]:
    """New metrics of one explainer."""
    of_sweep = settings.removed.num_patches, settings.curves, settings.levels, settings.empty
    metrics: dict[str, Any] = {
        f"curves_{removal}": PerturbationCurves(*of_sweep, removal if position else "", settings.until)
        for position, removal in enumerate(settings.removals if settings.curves else ())
    }
    metrics |= {name: MeanOfValues() for name in settings.probes}
    metrics |= {name: LOCALIZATIONS[name]() for name in settings.localization}
    metrics |= {name: MeanOfValues() for name in NUMBERS}
    metrics |= {name: agreement_metrics(settings.k)[name] for name in settings.agreement}
    return metrics | {"accuracy": Accuracy(), "cost": Cost(), "forward_passes": Passes()}


class Indices(PerImage):
    """The index of each image in the data set, in the order in which metrics keep their numbers."""

    def update(self, index: Tensor) -> None:
        """Add the indices of some images, (B,)."""
        self.keep(index[:, None])

    def compute(self) -> Tensor:
        return self.rows()[:, 0].long()


class Measurement(nn.Module):
    """Explains images by several explainers, perturbs the images in the order of their heatmaps, and sums the numbers.

    Besides what its settings name, it measures the accuracy of explainers that are classifiers, on labelled images; the
    forward passes of the target for each image; the explained images per second of one process, without the first
    batch, which is slower, if there are others; and on GPUs the peak memory.

    Args:
        target: the model to explain and to perturb.
        explainers: name → explainer of this target, any function of images and classes, on the grid of the settings.
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
        check_target(target, settings.grid, settings.curves)
        if settings.reference is not None and settings.reference not in explainers:
            raise InputError(
                f"expected reference to be one of the explainers {', '.join(explainers)}, got {settings.reference}: add"
                " it to them, or compare with none (reference=None)",
                "reference",
            )
        self.target = target
        self.settings = settings
        # Dictionaries beside lists of modules, because an nn.ModuleDict refuses some names
        self.explainers = dict(explainers)
        self.parts = find_modules(explainers.values())
        self.names = list(explainers if measured is None else measured)
        self.metrics: dict[str, Any] = {name: nn.ModuleDict(build_metrics(settings)) for name in self.names}
        self.states = nn.ModuleList(self.metrics.values())
        self.accuracy = Accuracy()
        self.index = Indices()
        self.sweeps = [Sweep(target, settings, removal) for removal in settings.removals if settings.curves]
        self.probes = {name: PROBES[name](target, settings) for name in settings.probes}
        self.batches = 0
        """Number of batches that this process has measured."""

    def in_one_process(self) -> Self:
        """Measure in this process alone, also within a training of several, and on the device of the target.

        Raises:
            InputError: if the device has no float64.
        """
        device = self.target.mean.device
        if finest_dtype(device) != torch.float64:
            raise InputError(f"device={device.type} has no float64, in which numbers are summed: set device=cpu")
        for part in self.to(device).modules():
            if isinstance(part, Metric):
                part.distributed_available_fn = lambda: False
        return self

    @property
    def forward_passes(self) -> dict[str, int]:
        """Forward passes of the target for each image, by explainer, for all `perturbations`, and to explain again."""
        shared = {key: count for probe in self.probes.values() for key, count in probe.passes.items()}
        masked = sum(sweep.forward_passes for sweep in self.sweeps) + sum(shared.values())
        passes = forward_passes(self.explainers)
        probed = [passes[name] for name in self.names if getattr(self.explainers[name], "timed", True)]
        again = sum(probe.explanations for probe in self.probes.values()) * sum(probed)
        passes |= {"perturbations": 1 + masked * len(self.names)}
        return passes | ({"explanations of probes": again} if again else {})

    @torch.no_grad()
    def update(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Measure the explainers on a batch.

        Args:
            batch: the `image`s, uint8 (B, C, H, W); perhaps their `index` in the data set, by default their number;
                their `label`, −1 if it is unknown, (B,) each; and the `truth` of the localization metrics.

        Returns:
            The `heatmaps` of each explainer, the explained `classes`, and the `logits`.
        """
        if self.batches == 1:
            for metrics in self.metrics.values():
                metrics["cost"].reset()  # of the first batch, which is slower
        batch = self._complete(batch)
        normalised = self.target.normalise(batch["image"])
        logits = self.target.classify(self.target.embed(normalised))
        predicted = logits.argmax(-1)
        self.accuracy.update(predicted, batch["label"])
        self.index.update(batch["index"])
        if self.settings.classes == "label":
            check_labels(batch["label"], self.target.num_classes, "classes=predicted", "classes")
        classes = predicted if self.settings.classes == "predicted" else batch["label"]
        explained = {name: self._explain(name, batch["image"], classes) for name in self.explainers}
        for sweep in self.sweeps:
            ends = torch.stack([logits, sweep.empty(normalised).expand_as(logits)], 1)
            for name, metrics in self.metrics.items():
                ranked = self._ranked(explained[name])
                outputs = sweep(normalised, ranked, batch["index"], classes, batch["label"], ends)
                metrics[f"curves_{sweep.removal}"].update(outputs)
        scores = self.target.scores(logits).gather(-1, classes[:, None])[:, 0]
        given = {**batch, "normalised": normalised, "classes": classes, "scores": scores}
        for name in self.names:
            self._probe(name, explained[name].heatmaps, given)
            self._compare(name, batch, explained)
        self.batches += 1
        return {"heatmaps": {name: of.heatmaps for name, of in explained.items()}, "classes": classes, "logits": logits}

    def _complete(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch on the device of the target, with an index and a label of every image."""
        device = self.target.mean.device
        own = {name: values.to(device) for name, values in batch.items()}
        count, first = len(own["image"]), len(self.index.rows())
        own.setdefault("index", torch.arange(first, first + count, device=device))
        own.setdefault("label", torch.full((count,), -1, device=device))
        return own

    def _explain(self, name: str, images: Tensor, classes: Tensor) -> Details:
        """The explanation of one explainer; if it is measured, the metrics of its cost and numbers are updated."""
        explainer = self.explainers[name]
        explanation, passes, seconds, memory = explain(explainer, self.target, images, classes)
        heatmaps = fit_heatmaps(explanation.heatmaps, images, self.settings.grid, name)
        check_heatmaps(name, heatmaps, images, self.settings.grid)
        if name in self.metrics:
            metrics = self.metrics[name]
            for key, values in explanation.numbers.items():
                metrics[key].update(values)
            metrics["forward_passes"].update(len(images), passes)
            if getattr(explainer, "timed", True):
                metrics["cost"].update(len(images), seconds, memory)
        return replace(explanation, heatmaps=heatmaps)

    def _ranked(self, explanation: Details) -> Tensor:
        """The map that is ranked and compared with objects: (B, rows, columns), or saliency of pixels (B, H, W)."""
        pixels = explanation.pixels if self.settings.order == "saliency" else None
        return explanation.heatmaps if pixels is None else pixels

    def _probe(self, name: str, heatmaps: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Update the metrics of the probes of one explainer."""
        explainer, own = self.explainers[name], self.settings

        def again(images: Tensor, classes: Tensor) -> Tensor:
            return fit_heatmaps(explainer(images, classes), images, own.grid, name)

        cached = not getattr(explainer, "timed", True)
        given = Given(self.target, own, batch, heatmaps, None if cached else again)
        for probe, compute in self.probes.items():
            values = compute(given)
            if values is not None:
                self.metrics[name][probe].update(values)

    def _compare(self, name: str, batch: Mapping[str, Tensor], explained: Mapping[str, Details]) -> None:
        """Update the metrics of one explainer that compare it with labels, objects and the reference."""
        metrics = self.metrics[name]
        if isinstance(explainer := self.explainers[name], SelfExplainer):
            metrics["accuracy"].update(explainer.logits(batch["image"]).argmax(-1), batch["label"])
        if "truth" in batch:
            for metric in self.settings.localization:
                metrics[metric].update(self._ranked(explained[name]), batch["truth"])
        reference = self.settings.reference
        if reference is not None and reference != name:
            for agreement in self.settings.agreement:
                metrics[agreement].update(explained[name].heatmaps, explained[reference].heatmaps)

    def summarise(self) -> tuple[dict[str, dict[str, Any]], ImageScores]:
        """The numbers of each explainer, and those of single images in the order of the data set.

        Every process has to call this function, because the metrics of all processes are joined.
        """
        index, order = self.index.scores("index")["index"].sort()
        results, scores = {}, {}
        with warnings.catch_warnings():
            # A metric without an update is NaN and left out; all processes compute all metrics, or they would deadlock
            warnings.filterwarnings("ignore", ".*was called before the ``update`` method.*")
            for name, metrics in self.metrics.items():
                kept = collect_scores(metrics)
                results[name] = numbers(metrics, kept)
                if getattr(self.explainers[name], "ignores_classes", False):
                    results[name]["ignores_classes"] = True
                aligned = {key: values for key, values in kept.items() if len(values) == len(order)}
                scores[name] = {key: aligned[key][order].float().cpu() for key in aligned.keys() & results[name].keys()}
        return results, ImageScores(index.long().cpu(), scores)


def check_target(target: TargetModel, grid: PatchGrid, curves: Sequence[Curve] = ()) -> None:
    """Raise an InputError for a grid of another model, curves of classes for a model of values, or a single class."""
    target.check_grid(grid)
    for name in curves:
        if CURVES[name].quantity not in ("probability", "logit"):
            check_probabilities(target, f"curves={name}", "leave it out, or take deletion or insertion")
    if target.num_classes < 2 and target.score == "softmax":
        raise InputError(
            f"expected a target with 2 classes or more, got {target.num_classes}: the probability of a single class is"
            " always 1; give a head of several classes, or score=sigmoid or value"
        )


def check_heatmaps(explainer: str, heatmaps: Tensor, images: Tensor, grid: PatchGrid) -> None:
    """Raise an InputError that names the explainer unless its heatmaps are finite and have a score for every patch."""
    expected = (len(images), *grid.shape)
    if heatmaps.shape != expected:
        raise InputError(
            f"expected heatmaps of shape {list(expected)} from {explainer}, got {list(heatmaps.shape)}: give it the"
            f" grid of the evaluation, or heatmaps at its pixels, {[len(images), *grid.size]}"
        )
    if not heatmaps.isfinite().all():
        raise InputError(
            f"expected finite heatmaps, got NaN or infinity from {explainer}: leave it out, or compute it in float32"
            " (precision=32-true)",
            "precision",
        )
