"""The prior of a refinement: an explainer, the model that it explains, and what it says about images."""

import os
import threading
from typing import Any

import torch
from torch import Tensor

from explainers import VectorExplainer
from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.inputs import check_explains_functionals
from explainers.runtime.modes import to_float64

COMPUTING = threading.RLock()
"""Held while a model computes for a refinement: methods attach hooks to it, which other threads would call."""
os.register_at_fork(before=COMPUTING.acquire, after_in_parent=COMPUTING.release, after_in_child=COMPUTING.release)


class Prior:
    """What an explainer, if there is one, says about uint8 images (B, C, H, W), before any masked pass.

    Args:
        passes: number of passes of each image that its heatmaps took beside the one of the embedding.

    Attributes:
        vectors: c_z of every patch, float32 (B, N, D); zeros without an explainer, `None` if it has heatmaps alone.
        embeddings: G(x), float32 (B, D).
    """

    vectors: Tensor | None

    @torch.no_grad()
    def __init__(self, explainer: Any, target: TargetModel, grid: PatchGrid, images: Tensor, passes: int = 0) -> None:
        self.explainer = explainer
        self.passes = passes
        self.grid = grid
        self.images = images
        shape = len(images), grid.num_patches, target.embed_dim
        if isinstance(explainer, VectorExplainer):
            with COMPUTING:
                vectors, embeddings = explainer.decompose(images)
            self.vectors = check_prior(vectors, shape, "vectors").float()
        else:
            with COMPUTING:
                embeddings = target.embed(target.normalise(images))
            self.vectors = None if explainer is not None else embeddings.new_zeros(shape)
        self.embeddings = embeddings.detach().float()

    def of_classes(self, classes: Tensor, functionals: Tensor) -> Tensor:
        """Heatmaps of classes (B,), whose functionals are (B, 1, D): float64, (B, 1, N)."""
        if self.vectors is not None:
            return products(functionals, self.vectors)
        with COMPUTING:
            return self._checked(self.explainer(self.images, classes))

    def of_functionals(self, functionals: Tensor) -> Tensor:
        """Heatmaps of functionals (B, V, D), or (B, D) for V = 1: float64, (B, V, N)."""
        if self.vectors is not None:
            return products(functionals if functionals.dim() == 3 else functionals[:, None], self.vectors)
        check_explains_functionals(self.explainer)
        with COMPUTING:
            return self._checked(self.explainer.explain(self.images, functionals), *functionals.shape[1:-1])

    def _checked(self, heatmaps: Any, *several: int) -> Tensor:
        """Check heatmaps (B, rows, columns), or (B, V, rows, columns) of several functionals: (B, V, N)."""
        shape = len(self.images), *several, *self.grid.shape
        return to_float64(check_prior(heatmaps, shape, "heatmaps")).reshape(len(self.images), -1, self.grid.num_patches)


def products(functionals: Tensor, vectors: Tensor) -> Tensor:
    """v · c of functionals (B, V, D) and vectors (B, N, D): float64, (B, V, N), even under autocast."""
    return to_float64(functionals) @ to_float64(vectors).mT


def check_explainer(explainer: Any) -> None:
    """Raise an InputError unless this is an explainer, a function of images and classes, or `None`."""
    known = explainer is None or callable(explainer) or isinstance(explainer, VectorExplainer)
    if not known or isinstance(explainer, type | TargetModel):
        got = explainer if isinstance(explainer, type | str) else type(explainer).__name__
        raise InputError(
            f"expected an explainer, got {got}: give None, or build(name, target, target.grid) of explainers.posthoc"
        )


def find_target(explainer: Any, target: Any) -> TargetModel:
    """The model to explain: the given one, or the explainer's; an InputError if there is none, or if they differ.

    It may have another head than the model of an explainer with vectors.
    """
    if target is not None and not isinstance(target, TargetModel):
        raise InputError(
            f"expected target as a TargetModel, got {type(target).__name__}: give TargetModel(model), or for a model of"
            " no library explainers.models.as_target(model)"
        )
    own = getattr(explainer, "target", None)
    if isinstance(own, TargetModel):
        if target is None or own is target:
            return own
        if own.backbone_identity() != target.backbone_identity():
            raise InputError(
                f"expected an explainer of this model, got one of {own.name} with other weights: leave out target=..."
            )
        if not isinstance(explainer, VectorExplainer) and own.head_identity() != target.head_identity():
            raise InputError(
                f"expected an explainer of this head, got one of another head on {own.name}: build it with this target"
            )
        return target
    if target is None:
        raise InputError(
            f"expected an explainer with the model that it explains, got {type(explainer).__name__}: give the model"
            " as target=..."
        )
    return target


def check_prior(values: Any, shape: tuple[int, ...], kind: str) -> Tensor:
    """Check heatmaps or vectors that an explainer returned, and detach them."""
    wanted = f"expected finite {kind} of shape {list(shape)} from the explainer, got"
    if not isinstance(values, Tensor):
        raise InputError(f"{wanted} {type(values).__name__}: return a tensor")
    got = f"{wanted} {str(values.dtype).removeprefix('torch.')} of shape {list(values.shape)}"
    if values.shape != shape:
        raise InputError(f"{got}: give its grid as grid=..., or average the pixels of patches")
    if not torch.isfinite(values).all():
        raise InputError(f"{got} with NaN or infinity: replace these values, or leave out their images")
    return values.detach()
