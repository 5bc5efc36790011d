"""How faithful explainers are on some photos: `explainers.evaluate(model, explainers, images)`."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from explainers import Explainer
from explainers.app.choosing import Method, choose, choose_batch_size, estimate_passes
from explainers.app.photos import Images, Photo, list_photos
from explainers.app.session import Classes, Session
from explainers.errors import InputError, checks_choices
from explainers.evaluation.evaluation import Evaluation
from explainers.evaluation.measurement import Measurement
from explainers.evaluation.result import COST_COLUMNS, CURVES, EvaluationResult
from explainers.masking import PatchGrid, Removal, read_heatmaps
from explainers.metrics.curves import Curve
from explainers.metrics.perturbation import curve_columns
from explainers.models.names import find_image_classes
from explainers.posthoc import build
from explainers.posthoc.defaults import COMPARED_METHODS

Heatmaps = Tensor | np.ndarray | Sequence[Tensor] | Sequence[np.ndarray]
"""One heatmap of each image."""

BATCH = 8
"""Largest number of images that are measured at once, unless another one is asked for."""

LEVELS = 21
"""Number of sparsities, including 0 and 1."""


@checks_choices
def evaluate(
    model: str | nn.Module,
    explainers: Mapping[str, Method | Heatmaps] | Sequence[Method] | None,
    images: Images,
    *,
    classes: Classes = None,
    curves: Sequence[Curve] = CURVES,
    removal: Removal = "zero",
    levels: int = LEVELS,
    grid: PatchGrid | None = None,
) -> EvaluationResult:
    """Measure how faithful explainers of a model are: what its outputs do when patches go in the order of heatmaps.

    Fidelity⁺ is the mean drop of the probability of the class while the most important patches are removed, Fidelity⁻
    while they are kept. Every explainer stands beside chance, on the same images and with the same masks.
    `model` and `images` are those of `explain`.

    Args:
        explainers: name → explainer, or a list of explainers: any function of images (B, C, H, W) and classes
            (B,) that returns heatmaps (B, rows, columns), a name of a method, or what `explain` takes else. `None`
            takes the default methods that explain the model. In place of a named explainer, heatmaps that another tool
            has computed: an array or a list, one for each image, in their order. Heatmaps at the pixels that the model
            sees, (H, W), are averaged over each patch.
        classes: the class whose probability is measured, by name or index, or one for each image; `None` for the
            predicted ones.
        curves: names of the measured curves, see `explainers.metrics.CURVES`.
        removal: what replaces removed patches: `zero`, `black`, or `drop`.
        levels: number of sparsities, including 0 and 1: each explainer takes 2 · (levels − 2) masked images of a photo.
        grid: the patches of the heatmaps; `None` for the model's own.

    Returns:
        Numbers of each explainer, and of each image; it prints as a table.

    Raises:
        InputError: for images that cannot be read, and explainers that do not fit the model.
    """
    session = Session(model, "auto" if explainers is None else "Chance")
    if explainers is None:
        built = {each.method: each.explainer for each in add_default_methods(session)}
    else:
        built = _build_explainers(session, explainers)
    settings = Evaluation(
        grid or session.target.grid,
        curves,
        levels,
        removals=(removal,),
        localization=(),
        agreement=(),
        classes="predicted" if classes is None else "label",
    )
    return measure_photos(session, built, list_photos(images), settings, classes=classes)


def measure_photos(
    session: Session,
    explainers: Mapping[str, Explainer],
    photos: Sequence[Photo],
    settings: Evaluation,
    batch_size: int | None = None,
    classes: Classes = None,
) -> EvaluationResult:
    """Measure chance and explainers of a session's model; an interruption has a note how far it came.

    `batch_size` is the number of images at once; `None` for what fits, at most `BATCH`.
    """
    chance: Explainer = build("Chance", session.target, settings.grid)
    explainers = {"Chance": chance, **explainers}
    chosen = find_image_classes(classes, session.names, len(photos))
    batch_size = batch_size or min(BATCH, *(choose_batch_size(each, session.target) for each in explainers.values()))
    passes = sum(map(estimate_passes, explainers.values())) + len(explainers) * 2 * (settings.levels - 2)
    names: list[str] = []
    saved = {name: each for name, each in explainers.items() if isinstance(each, SavedHeatmaps)}
    for name, each in saved.items():
        if len(each.heatmaps) != len(photos):
            count = f"got {len(each.heatmaps)} for {len(photos)} images"
            raise InputError(f"explainers= {name}: expected one heatmap of each image, in their order, {count}")

    measurement = Measurement(session.target, explainers, settings).in_one_process()
    try:
        for batch, pixels, places in session.batches(photos, "measuring", batch_size, passes):
            labels = [chosen[place] for place in places]
            for each in saved.values():
                each.places = places
            measurement.update({"image": pixels} | ({} if None in labels else {"label": torch.tensor(labels)}))
            names.extend(photo.name for photo in batch)  # once they are measured
    except KeyboardInterrupt as stopped:
        stopped.add_note(f"after {len(names)} of {len(photos)} images")
        raise
    numbers, scores = measurement.summarise()
    for row in numbers.values():
        if "images_per_second" in row:
            row["seconds_per_image"] = 1 / row.pop("images_per_second")
    columns = curve_columns(settings.curves) | COST_COLUMNS
    return EvaluationResult(numbers, scores.rows, names, columns, asdict(session.transform))


class SavedHeatmaps:
    """Explains by heatmaps that were computed before, one of each image; it takes no pass."""

    timed, forward_passes = False, 0
    places: Sequence[int] = ()
    """Numbers of the images that are explained next."""

    def __init__(self, heatmaps: Any, name: str) -> None:
        self.heatmaps = read_heatmaps(heatmaps, f"explainers= {name}")

    def __call__(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        return self.heatmaps[list(self.places)]


def add_default_methods(session: Session) -> list[Session]:
    """A session, and those with the same model and one of the `COMPARED_METHODS` that explain it."""
    sessions = [session]
    for method in COMPARED_METHODS:
        with suppress(InputError):
            sessions.append(session.with_method(method, "classes"))
    return sessions


def _build_explainers(session: Session, explainers: Mapping[str, Any] | Sequence[Method]) -> dict[str, Explainer]:
    """Name → explainer; those of a list are named after their methods."""
    if isinstance(explainers, Mapping):
        return {
            name: SavedHeatmaps(each, name)
            if isinstance(each, Tensor | np.ndarray | list | tuple)
            else choose(session.target, each)[0]  # type: ignore[arg-type]  # no other sequences
            for name, each in explainers.items()
        }
    if isinstance(explainers, str) or not isinstance(explainers, Sequence):
        raise InputError('explainers= needs a list or a dictionary, such as ["GAE", "RISE"] or {"mine": function}')
    built: dict[str, Explainer] = {}
    for method in explainers:
        explainer, label = choose(session.target, method)
        if label in built:
            raise InputError(f"explainers= has {label} twice: give a dictionary with two names")
        built[label] = explainer
    return built
