"""What is measured of explainers of one target, on the same images, classes and perturbations, and how."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor, nn

from explainers import Details, Explainer, SelfExplainer
from explainers.errors import InputError, check_choices, check_positive, check_range
from explainers.evaluation.passes import explain, find_modules, fit_heatmaps, forward_passes
from explainers.evaluation.sweep import PROBES, Order, Probe, Probes, Sweep, rank_patches
from explainers.masking import PatchGrid, Removal, level_sizes
from explainers.metrics.agreement import AGREEMENTS, Agreement, agreement_metrics
from explainers.metrics.cost import NUMBERS, Cost, ExplainerStatistics, Passes
from explainers.metrics.curves import CURVES, Curve, find_needed_sides
from explainers.metrics.localization import LOCALIZATIONS, Localization, Localized
from explainers.metrics.means import Accuracy, Metric, PerImage, collect_scores, numbers
from explainers.metrics.perturbation import PerturbationCurves, curve_columns
from explainers.models import TargetModel
from explainers.models.inputs import check_labels
from explainers.models.scores import check_probabilities
from explainers.results.reading import ImageScores
from explainers.runtime.modes import finest_dtype


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
    ) -> Any:
        """The `EvaluationModule` that measures these explainers on the batches of a Trainer."""
        from explainers import evaluation  # at use, because it needs Lightning

        return evaluation.EvaluationModule(target, explainers, self, measured)

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
        patches = self.grid if self.order == "patches" else PatchGrid(self.grid.size, 1)
        of_sweep = patches.num_patches, self.curves, self.levels, self.empty
        curves = {
            f"curves_{removal}": PerturbationCurves(*of_sweep, removal if position else "", self.until)
            for position, removal in enumerate(self.removals if self.curves else ())
        }
        probes: dict[str, Any] = {name: PROBES[name]() for name in self.probes}
        others = {"localization": Localization(self.localization), "accuracy": Accuracy()}
        others |= {"numbers": ExplainerStatistics()}
        agreement: dict[str, Any] = {name: agreement_metrics(self.k)[name] for name in self.agreement}
        return {**curves, **probes, **others, **agreement, "cost": Cost(), "forward_passes": Passes()}

    def identity(self) -> dict[str, Any]:
        """The settings that numbers of one name depend on; results are comparable only if all of these are equal."""
        compared: dict[str, Any] = {} if self.reference is None else {"reference": self.reference}
        return {
            "image_size": list(self.grid.size),
            "patches": list(self.grid.shape),
            "removals": list(self.removals),
            "order": self.order,
            "levels": self.levels,
            "until": self.until,
            "empty": self.empty,
            "probes": list(self.probes),
            "classes": self.classes,
            **compared,
        }


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
        check_target(target, settings.grid, settings.curves)
        if settings.reference is not None and settings.reference not in explainers:
            raise InputError(
                f"expected reference to be one of the explainers {', '.join(explainers)}, got {settings.reference}: add"
                " it to them, or compare with none (reference=None)",
                "reference",
            )
        self.target = target
        self.settings = settings
        # A dictionary beside a list of modules, because an nn.ModuleDict refuses some names
        self.explainers = dict(explainers)
        self.parts = find_modules(explainers.values())
        self.names = list(explainers if measured is None else measured)
        self.sweeps = [self._sweep(removal, settings.order) for removal in settings.removals if settings.curves]
        self.probes = Probes(settings.probes, self._sweep(settings.removals[0], "patches"))
        self.metrics = nn.ModuleList(nn.ModuleDict(settings.metrics()) for _ in self.names)
        self.accuracy = Accuracy()
        self.index = Indices()

    def _sweep(self, removal: Removal, order: Order) -> Sweep:
        own = self.settings
        sides = find_needed_sides(own.curves)
        return Sweep(self.target, own.grid, removal, own.levels, order, own.chunk_size, sides, own.until)

    @property
    def forward_passes(self) -> dict[str, int]:
        """Forward passes of the target for each image, by explainer, for all `perturbations`, and to explain again."""
        masked = sum(sweep.forward_passes for sweep in self.sweeps) + self.probes.forward_passes
        passes = forward_passes(self.explainers)
        probed = [passes[name] for name in self.names if getattr(self.explainers[name], "timed", True)]
        again = self.probes.explanations * sum(probed)
        passes |= {"perturbations": 1 + masked * len(self.names)}
        return passes | ({"explanations of probes": again} if again else {})

    def update(self, batch: Mapping[str, Tensor], timed: bool = True) -> dict[str, Any]:
        """Measure the explainers on a batch.

        Args:
            batch: the `image`s, uint8 (B, C, H, W); their `index` in the data set, and their `label`, −1 if it is
                unknown, (B,) each; and perhaps the `truth` of the localization metrics.
            timed: whether to measure the time; the first batch is slower.

        Returns:
            The `heatmaps` of each explainer, the explained `classes`, and the `logits`.
        """
        normalised = self.target.normalise(batch["image"])
        logits = self.target.classify(self.target.embed(normalised))
        predicted = logits.argmax(-1)
        self.accuracy.update(predicted, batch["label"])
        self.index.update(batch["index"])
        if self.settings.classes == "label":
            check_labels(batch["label"], self.target.num_classes, "classes=predicted", "classes")
        classes = predicted if self.settings.classes == "predicted" else batch["label"]
        explained = {name: self._explain(name, batch["image"], classes, timed) for name in self.explainers}
        for sweep in self.sweeps:
            ends = torch.stack([logits, sweep.empty(normalised).expand_as(logits)], 1)
            for name, metrics in self._metrics():
                scores = rank_patches(explained[name], sweep.order)
                outputs = sweep(normalised, scores, batch["index"], classes, batch["label"], ends)
                metrics[f"curves_{sweep.removal}"].update(outputs)
        scores = self.target.scores(logits).gather(-1, classes[:, None])[:, 0]
        given = {**batch, "normalised": normalised, "classes": classes, "scores": scores}
        for name, metrics in self._metrics():
            self.probes.update(metrics, self.explainers[name], explained[name].heatmaps, given)
            self._update(name, metrics, batch, explained)
        return {"heatmaps": {name: of.heatmaps for name, of in explained.items()}, "classes": classes, "logits": logits}

    def _metrics(self) -> list[tuple[str, Any]]:
        """The name and the metrics of every measured explainer."""
        return list(zip(self.names, self.metrics, strict=True))

    def _explain(self, name: str, images: Tensor, classes: Tensor, timed: bool) -> Details:
        """The explanation of one explainer; if it is measured, the metrics of its cost and numbers are updated."""
        explainer = self.explainers[name]
        explanation, passes, seconds, memory = explain(explainer, self.target, images, classes)
        heatmaps = fit_heatmaps(explanation.heatmaps, images, self.settings.grid, name)
        check_heatmaps(name, heatmaps, images, self.settings.grid)
        if name in self.names:
            metrics = dict(self._metrics())[name]
            metrics["numbers"].add(explanation.numbers)
            metrics["forward_passes"].update(len(images), passes)
            if timed and getattr(explainer, "timed", True):
                metrics["cost"].update(len(images), seconds, memory)
        return replace(explanation, heatmaps=heatmaps)

    def _update(self, name: str, metrics: Any, batch: Mapping[str, Tensor], explained: Mapping[str, Details]) -> None:
        """Update the metrics of one explainer that need no masked images."""
        if isinstance(explainer := self.explainers[name], SelfExplainer):
            metrics["accuracy"].update(explainer.logits(batch["image"]).argmax(-1), batch["label"])
        if "truth" in batch:
            metrics["localization"].update(rank_patches(explained[name], self.settings.order), batch["truth"])
        reference = self.settings.reference
        if reference is not None and reference != name:
            for metric in self.settings.agreement:
                metrics[metric].update(explained[name].heatmaps, explained[reference].heatmaps)

    def summarise(self) -> tuple[dict[str, dict[str, Any]], ImageScores]:
        """The numbers of each explainer, and those of single images in the order of the data set.

        Every process has to call this function, because the metrics of all processes are joined.
        """
        index, order = self.index.scores("index")["index"].sort()
        results, scores = {}, {}
        with warnings.catch_warnings():
            # A metric without an update is NaN and left out; all processes compute all metrics, or they would deadlock
            warnings.filterwarnings("ignore", ".*was called before the ``update`` method.*")
            for name, metrics in self._metrics():
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


@torch.no_grad()
def measure(
    target: TargetModel,
    explainers: Mapping[str, Explainer],
    batches: Iterable[Mapping[str, Tensor]],
    settings: Evaluation,
) -> tuple[dict[str, dict[str, Any]], ImageScores]:
    """Measure explainers on some images, in this process alone and without Lightning.

    Args:
        target: the model to explain.
        explainers: name → explainer of it: any function of images and classes.
        batches: each with the `image`s, uint8 (B, C, H, W), and perhaps a `label` of each, (B,). The first batch is not
            timed if there are others.
        settings: what is measured.

    Returns:
        Explainer → numbers, with the seconds for each image in place of the images per second; and the numbers of
        single images.

    Raises:
        InputError: for a model on a device without float64, and heatmaps that do not fit.
    """
    device = target.mean.device
    if finest_dtype(device) != torch.float64:
        raise InputError(f"device={device.type} has no float64, in which numbers are summed: set device=cpu")
    measurement = Measurement(target, explainers, settings).to(device)
    for part in measurement.modules():
        if isinstance(part, Metric):
            part.distributed_available_fn = lambda: False  # also within a training of several processes
    count = 0
    for number, given in enumerate(batches):
        batch = {name: values.to(device) for name, values in given.items()}
        size = len(batch["image"])
        batch["index"] = torch.arange(count, count + size, device=device)
        batch.setdefault("label", torch.full((size,), -1, device=device))
        if number == 1:
            for _, metrics in measurement._metrics():
                metrics["cost"].reset()  # of the first batch, which is slower
        measurement.update(batch)
        count += size
    results, scores = measurement.summarise()
    for row in results.values():
        if "images_per_second" in row:
            row["seconds_per_image"] = 1 / row.pop("images_per_second")
    return results, scores
