"""Learned and post-hoc explainers of vision models.

    explain(image, model)                  the heatmap of a class, or of a text, in an image
    compare(image, other, model)           which patches make two images alike
    nearest(image, folder, model)          the most similar images of a folder, and why
    evaluate(model, explainers, images)    how faithful explainers are: any function is one
    audit(folder, model)                   what a model relies on in all images of a folder, the suspicious first
    refine(explainer, images)              heatmaps improved by masked forward passes, with standard errors
    load(folder), available()              trained explainers
    add_vector(model)                      a fine-tuned model that explains itself, without training
    overlay(image, heatmap)                a heatmap drawn over its image
    Session(model)                         a model that explains many images
    as_target(model, head=..., score=...)  a model with all that belongs to it, which every function takes

`Explainer` is the interface of every explainer; the other protocols say what some of them can do besides.

`images` of an explainer are uint8 or uint16, (B, C, H, W), and every model normalises them itself. `keep` is boolean,
(B, M, N), and True at visible patches; patches are numbered row by row. A letter of a shape means the same everywhere:

    B  images              C  channels             H, W  pixels
    M  masks per image     N  patches              Z  sampled patches per image
    L  layers (blocks)     T  tokens               D  embedding width
    V  functionals v       A  attention heads      K  classes
    J  tasks               Q  levels of sparsity

Heatmaps are (B, rows, columns), numbers of square patches; N is rows · columns.

`S` is a set of patches (a coalition), and `t` a temperature.
"""

from __future__ import annotations  # so that torch is imported by what computes: `explainers --help` does not

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from explainers.app.audits import audit
    from explainers.app.comparing import Comparison, compare, nearest
    from explainers.app.evaluating import evaluate
    from explainers.app.explanation import Explanation
    from explainers.app.session import Session, explain
    from explainers.auditing.audit import Audit
    from explainers.evaluation.result import EvaluationResult
    from explainers.models.convert import as_target
    from explainers.refinement.refine import refine
    from explainers.report.overlays import overlay
    from explainers.share import load
    from explainers.share.catalogue import available
    from explainers.vectors.adding import add_vector

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "Comparison",
    "DetailedExplainer",
    "Details",
    "EvaluationResult",
    "Explainer",
    "Explanation",
    "FunctionalExplainer",
    "PreparedExplainer",
    "SelfExplainer",
    "Session",
    "VectorExplainer",
    "add_vector",
    "as_target",
    "audit",
    "available",
    "compare",
    "evaluate",
    "explain",
    "load",
    "nearest",
    "overlay",
    "refine",
]


def import_at_use(package: str, *modules: str) -> Callable[[str], Any]:
    """Build the `__getattr__` of a package: it looks for a name of `__all__` in modules that are imported at first use.

    Type checkers must not see it, or every misspelt name has the type `Any`: define it under `if not TYPE_CHECKING`.

    Args:
        package: name of the package.
        modules: names of its modules, in which a name is looked for one after the other.
    """

    def attribute(name: str) -> Any:
        for module in modules if name in sys.modules[package].__all__ else ():
            loaded = vars(import_module(f"{package}.{module}"))
            if name in loaded:
                return loaded[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute


if not TYPE_CHECKING:  # the same names as above, imported at first use, because every module imports this file first
    MODULES = {
        "Audit": "explainers.auditing.audit",
        "Comparison": "explainers.app.comparing",
        "EvaluationResult": "explainers.evaluation.result",
        "Explanation": "explainers.app.explanation",
        "Session": "explainers.app.session",
        "add_vector": "explainers.vectors.adding",
        "as_target": "explainers.models.convert",
        "audit": "explainers.app.audits",
        "available": "explainers.share.catalogue",
        "compare": "explainers.app.comparing",
        "evaluate": "explainers.app.evaluating",
        "explain": "explainers.app.session",
        "load": "explainers.share",
        "nearest": "explainers.app.comparing",
        "overlay": "explainers.report.overlays",
        "refine": "explainers.refinement.refine",
    }

    def __getattr__(name: str) -> Any:
        if name not in MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    """Name the public names, for completion in shells and notebooks, also before their first use."""
    return sorted({*globals(), *__all__})


class Explainer(Protocol):
    """Interface of every explainer, learned or post-hoc: a function from images and classes to heatmaps.

    The constructor of every explainer takes the model to explain as the keyword argument `target`. Five attributes are
    optional:

    - `forward_passes`: number of forward passes of the target for each image; 1 if the attribute is missing. An
      evaluation announces this number; its results report the counted passes. One masked image is one pass. Backward
      passes, the network of a learned explainer, and a blank image embedded once per batch are not counted.
    - `passes_vary`: True if the number of passes depends on the image; `forward_passes` is then an upper bound.
    - `ignores_classes`: True if the heatmaps do not depend on `classes`, for example because the explainer chooses the
      class itself.
    - `signed`: True if a value below 0 means that a patch opposes the class; False if values cannot be negative, or if
      their zero has no meaning, as in attention. Pictures have one colour for each sign, or shades from less to more
      important. Where the attribute is missing, heatmaps with values below 0 are drawn as signed.
    - `timed`: False if the heatmaps come from a cache, so that the time of a call does not measure the explainer.
    """

    def __call__(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain one class of each image.

        Args:
            images: (B, C, H, W).
            classes: the class to explain in each image, (B,).

        Returns:
            Heatmaps, (B, rows, columns); higher is more important.
        """
        ...


@runtime_checkable
class SelfExplainer(Protocol):
    """An explainer that is also a classifier, so that its accuracy can be measured."""

    def logits(self, images: Tensor) -> Tensor:
        """Classify images (B, C, H, W) → logits (B, K)."""
        ...


@runtime_checkable
class FunctionalExplainer(Protocol):
    """An explainer of any linear functional of the embedding, such as the logit of a class under a linear head."""

    def explain(self, images: Tensor, functionals: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        """Explain v · G(x) of images.

        Args:
            images: (B, C, H, W).
            functionals: v, (B, D), or (B, V, D) for several of each image; or a function of the embeddings (B, D) that
                returns v (B, V, D), such as one that divides by their length.

        Returns:
            Heatmaps, (B, rows, columns) or (B, V, rows, columns).
        """
        ...


@runtime_checkable
class VectorExplainer(Protocol):
    """An explainer with one vector c_z of each patch: v · c_z attributes v · G(x), for any linear functional v."""

    def decompose(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the vectors c_z (B, N, D) and the embeddings (B, D) of images (B, C, H, W)."""
        ...


@runtime_checkable
class PreparedExplainer(Protocol):
    """An explainer that computes what all classes need once, so that every further class costs almost nothing."""

    def prepare(self, images: Tensor) -> Callable[[Tensor], Tensor]:
        """Do the expensive part for images (B, C, H, W).

        Returns:
            A function of the class to explain in each image, (B,) → heatmaps (B, rows, columns), equal to those of
            `Explainer.__call__`.
        """
        ...


@dataclass(frozen=True)
class Details:
    """Heatmaps, and what some methods compute besides.

    Args:
        heatmaps: (B, rows, columns); higher is more important.
        pixels: the method's saliency maps, (B, H, W), whose means or sums over patches are the heatmaps; `None` if the
            method scores patches only.
        numbers: name → one number for each image, (B,), see `metrics.cost`.
    """

    heatmaps: Tensor
    pixels: Tensor | None = None
    numbers: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class DetailedExplainer(Protocol):
    """An explainer that scores single pixels, or measures something of every image while it explains it."""

    def details(self, images: Tensor, classes: Tensor) -> Details:
        """Explain one class of each image, with the arguments of `Explainer.__call__`."""
        ...
