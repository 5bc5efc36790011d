"""Adds a shipped explainability vector to a fine-tuned model: it then explains itself, without labels, in seconds."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.convert import as_target
from explainers.models.inputs import WHITE, validate_classes
from explainers.runtime.modes import ordinary_tensors
from explainers.saved.weights import is_finite, quote
from explainers.vectors.fixed_head import fix_own_head, select_explained
from explainers.vectors.lambda_sweep import UNCHANGED, LambdaSweep, Point, best_row, summary, sweep_points
from explainers.vectors.method_labels import MethodLabels
from explainers.vectors.self_explaining import SelfExplaining
from explainers.vectors.vector_files import TUNED, find_vector, read_vector

log = logging.getLogger(__name__)

LAMBDAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
"""Values of λ₂ that `auto` tries."""

BATCH = 16
"""Images in a batch of the sweep."""


class SelfExplained(nn.Module):
    """A classifier with an explainability vector: one forward pass predicts and explains, see `add_vector`.

    Args:
        explainer: returns heatmaps alone, as every explainer; its `export` writes a folder for `explainers.load`.
        lambda_2: λ₂, the weight of the vector.
    """

    def __init__(self, explainer: SelfExplaining, lambda_2: float) -> None:
        super().__init__()
        self.explainer = explainer
        self.lambda_2 = lambda_2

    def forward(self, images: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Predict, and explain `classes` (B,), by default the predicted ones, of uint8 images (B, C, H, W).

        Returns:
            Logits (B, K), and heatmaps (B, rows, columns) of the classes' logits.
        """
        logits, attributions = self.explainer.predict_and_explain(images)
        classes = validate_classes(logits.argmax(-1) if classes is None else classes, images, logits.shape[-1])
        return logits, select_explained(attributions, {"explained": classes}).view(-1, *self.explainer.grid.shape)


@torch.no_grad()
@ordinary_tensors()
def add_vector(
    model: Any, lambda_2: float | str = "auto", vector: str | Path = "shipped", images: Tensor | None = None
) -> SelfExplained:
    """Make a model explain itself: add an explainability vector to a copy of it. Needs neither labels nor training.

    Args:
        model: the model, which stays as it is: a `TargetModel`, or what `as_target` takes. Its head is linear, or
            compares embeddings with directions. It was fine-tuned from the base model of the vector, see `TUNED`.
        lambda_2: λ₂, the weight of the vector; the larger it is, the more predictions change. `auto`: with images, the
            one of `LAMBDAS` whose heatmaps agree best with DecompX-PLUS among those that keep 99 % of the predictions;
            without images, the one that the file of the vector recommends.
        vector: `shipped`, the name of the base model of a shipped vector (see `explainers.vectors.available`), or a
            file.
        images: uint8 (B, C, H, W) like those to explain, without labels, a handful to a few hundred. The head is fitted
            to them, so that predictions stay those of the model, see `restoration`.

    Returns:
        A module in eval mode on the device of the model, whose weights need no gradients.

    Raises:
        InputError: if no vector fits the model, or an argument is wrong.
    """
    if lambda_2 != "auto" and not is_finite(lambda_2):
        raise InputError(f"lambda_2={quote(lambda_2)} is neither auto nor a number, such as 0.75", "lambda_2")
    target = as_target(model).frozen()
    images = None if images is None else check_images(images, target)
    file, header = find_vector(vector, target, TUNED)
    tau, start = read_vector(file, target), target.backbone.state_dict()
    explainer = SelfExplaining(target, target.grid)
    explainer.target.head = fix_own_head(explainer.target).read_as(**header["head"]).to(target.mean.device)
    if lambda_2 != "auto":
        chosen = float(lambda_2)
    elif images is None:
        chosen = header["lambda_2"]
        log.warning(f"lambda_2=auto is {chosen:g}, as the vector's file recommends; images= chooses it for this model")
    else:
        sweep = LambdaSweep(explainer, start, tau, sweep_points(1.0, LAMBDAS)).to(target.mean.device)
        chosen = choose_lambda(sweep, MethodLabels(target, target.grid), images)
    chosen_point = LambdaSweep(explainer, start, tau, sweep_points(1.0, [chosen]))
    if images is not None:
        chosen_point.fit_restorations(batches(images))
    explained = SelfExplained(chosen_point.load(Point(1.0, chosen)), chosen).eval()
    black = torch.zeros(1, target.channels, *target.grid.size, dtype=torch.uint8, device=target.mean.device)
    if not all(each.isfinite().all() for each in explained(black if images is None else images[:1])):
        origin = f"{file}: " if lambda_2 == "auto" else ""
        raise InputError(
            f"{origin}lambda_2={chosen:g} makes logits or heatmaps NaN or infinite: give a smaller one, such as 0.75"
        )
    return explained


def check_images(images: Any, target: TargetModel) -> Tensor:
    """Return images for a target as a tensor on its device; an InputError unless they are two or more of its size."""
    given = torch.from_numpy(images) if isinstance(images, np.ndarray) and images.dtype.kind == "u" else images
    wanted, shape = [target.channels, *target.grid.size], [*getattr(given, "shape", [])]
    if not isinstance(given, Tensor) or shape[1:] != wanted or given.dtype not in WHITE:
        got = f"{type(images).__name__} {shape} {getattr(images, 'dtype', '')}".rstrip()
        raise InputError(f"images= needs a tensor or an array of uint8, (B, {', '.join(map(str, wanted))}), got {got}")
    if len(given) < 2:
        raise InputError(f"images= needs 2 images or more, one half to fit and one to measure, got {len(given)}")
    return given.to(target.mean.device)


def choose_lambda(sweep: LambdaSweep, labels: MethodLabels, images: Tensor) -> float:
    """Choose λ₂ by one half of the images, after the head was fitted to the other half, and log what it changes."""
    sweep.fit_restorations(batches(images[::2]))
    for batch in batches(images[1::2]):
        with torch.enable_grad():
            rows = batch | labels(batch)
        sweep.update(rows | {"label": torch.full_like(rows["explained"], -1)})
    measured = sweep.compute()
    best = best_row(measured, 0.01, "rank_correlation")
    log.warning(f"lambda_2=auto: {summary(measured, best, 'rank_correlation')}")
    sweep.load(UNCHANGED)
    return best["lambda_2"]


def batches(images: Tensor) -> Iterator[dict[str, Tensor]]:
    """Images in batches of at most `BATCH`."""
    return ({"image": batch} for batch in images.split(BATCH))
