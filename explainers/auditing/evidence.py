"""Evidence: what the strongest patches of every image add to its class, from one pass for each image."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from explainers.errors import InputError
from explainers.learned.trunk import Decomposition, decompose_all
from explainers.models import TargetModel
from explainers.models.functionals import choose_temperature, head_functionals
from explainers.models.scores import check_probabilities


@dataclass(frozen=True)
class Evidence:
    """What the strongest patches of some images add to classes.

    A patch's evidence for class y is v_y · c_z, with v_y of `head_functionals` at temperature infinity: the logit of
    the class relative to the mean of the others. The strongest patches are those with the most evidence for the
    predicted class or, in a mistake, for that or the label, whichever is more.

    Args:
        numbers: places of the images in the list of photos, (B,).
        labels: their classes, (B,); −1 where it is not known.
        predicted: the classes that the model predicts, (B,).
        embeddings: float16, (B, D).
        totals: the sum of the positive evidence of all patches for the predicted class, float32, (B,).
        patches: numbers of the strongest patches, int16, (B, P), the strongest first.
        vectors: their vectors c_z, float16, (B, P, D).
    """

    numbers: Tensor
    labels: Tensor
    predicted: Tensor
    embeddings: Tensor
    totals: Tensor
    patches: Tensor
    vectors: Tensor


def check_classes(target: TargetModel) -> None:
    """Raise an InputError for a model whose classes are not compared: of a single class, or of values.

    A regression predicts no class, so there is none for which its patches could be evidence.
    """
    check_probabilities(target, "an audit", "give a classifier, or a head of classes by head=", "head")
    if target.num_classes < 2:
        raise InputError(
            f"an audit compares a class with the others, but {target.name} has {target.num_classes} class: give a"
            " classifier, or a head of two classes or more by head=",
            "head",
        )


def functionals(target: TargetModel, embeddings: Tensor, classes: Tensor) -> Tensor:
    """Compute v_y of a class of each image, whose product with a vector c_z is the patch's evidence for the class.

    Of classes that compete, a linear head has v_y = W_y − the mean row of the others: the same in all images. A cosine
    head has it times a factor of the image; for any other head, it is the gradient at the embedding. Of classes that do
    not compete (`sigmoid`), v_y explains the logit.

    Args:
        target: the model.
        embeddings: (B, D).
        classes: (B,).

    Returns:
        v, (B, D), float32, on the device of the embeddings, which may differ from the model's.
    """
    own = embeddings.to(target.mean), classes.to(target.mean.device)
    v = head_functionals(target.head, own[0], choose_temperature(target.score, math.inf), own[1])
    return v.to(embeddings.device)


def decompose_lazily(explainer: Any, images: Tensor) -> Decomposition:
    """Decompose uint8 images (B, C, H, W) by an explainer with vectors, which may compute only what is asked for."""
    if hasattr(explainer, "decompose_lazily"):
        return explainer.decompose_lazily(images)
    vectors, embeddings = explainer.decompose(images)
    return decompose_all(vectors.float(), embeddings)


@torch.no_grad()
def take_evidence(explainer: Any, images: Tensor, labels: Tensor, strongest: int = 40) -> Evidence:
    """Take the evidence of one batch of images, in one forward pass of the model.

    Args:
        explainer: a `VectorExplainer` with `target` and `grid`, such as AnyHead, PathFlow, DirectPaths, or CAM for a
            CNN. Vectors are not refined.
        images: uint8, (B, C, H, W).
        labels: their classes, (B,); −1 where it is not known.
        strongest: P, number of patches to keep of each image; all, if it has fewer, such as the 7 × 7 of a CNN.

    Returns:
        The evidence, on the CPU, of images numbered from 0.

    Raises:
        InputError: if the model's classes cannot be compared, or vectors are not finite in half precision.
    """
    target: TargetModel = explainer.target
    check_classes(target)
    embeddings, products, vectors = decompose_lazily(explainer, images.to(target.mean.device))
    embeddings = embeddings.float()
    predicted = target.classify(embeddings).argmax(-1)
    wanted = labels.to(predicted.device)
    wanted = torch.where(wanted < 0, predicted, wanted)
    of_classes = torch.stack([functionals(target, embeddings, classes) for classes in (predicted, wanted)], 1)
    scores = products(of_classes)  # (B, 2, N)
    patches = scores.amax(1).topk(min(strongest, scores.shape[-1])).indices
    return Evidence(
        torch.arange(len(images)),
        labels.long().cpu(),
        predicted.cpu(),
        to_half(embeddings, "embeddings", target.name),
        scores[:, 0].clamp(min=0).sum(-1).cpu(),
        patches.short().cpu(),
        to_half(vectors(patches), f"vectors of {type(explainer).__name__}", target.name),
    )


def to_half(values: Tensor, kind: str, model: str) -> Tensor:
    """Convert values to float16 on the CPU; an InputError for what is not finite, or beyond ±65504, there."""
    halves = values.half().cpu()
    if not halves.isfinite().all():
        raise InputError(
            f"expected {kind} within ±65504 of {model}, got NaN or larger ones: check its weights, and compute in"
            " float32 without autocast"
        )
    return halves
