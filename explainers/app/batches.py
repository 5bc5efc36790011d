"""Batches of images on the model's device: scores and heatmaps of classes or texts, which are checked."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from explainers import Explainer, PreparedExplainer, VectorExplainer
from explainers.errors import InputError
from explainers.masking import is_constant, read_heatmaps
from explainers.models import TargetModel
from explainers.models.inputs import check_explains_functionals
from explainers.posthoc.white_box import class_functionals
from explainers.text import TextHead


class PreparedFunctionals:
    """Images, uint8 or uint16 (B, C, H, W), and explanations of linear functionals of their embeddings.

    An explainer with vectors, such as AnyHead, needs one pass for all functionals; others need one for each. For one
    that explains classes alone, such as RISE, an InputError is raised.
    """

    @torch.no_grad()
    def __init__(self, explainer: Explainer, images: Tensor) -> None:
        self.explainer: Any = explainer  # with the target and grid that it explains
        self.images = images
        self.vectors: Tensor | None = None
        if isinstance(explainer, VectorExplainer):
            self.vectors, embeddings = explainer.decompose(images)
        else:
            check_explains_functionals(explainer)
            target = getattr(explainer, "target")  # noqa: B009
            embeddings = target.embed(target.normalise(images))
        self.embeddings = embeddings.float()

    @torch.no_grad()
    def heatmaps(self, functionals: Callable[[Tensor], Tensor]) -> Tensor:
        """Explain v (B, D), a function of the embeddings (B, D), in each image: heatmaps (B, rows, columns)."""
        if self.vectors is None:
            explained = self.explainer.explain(self.images, lambda embeddings: functionals(embeddings)[:, None])
            return explained[:, 0].float().cpu()
        scores = (self.vectors.float() @ functionals(self.embeddings)[..., None])[..., 0]
        return scores.unflatten(-1, self.explainer.grid.shape).cpu()


class PreparedClasses:
    """Images, uint8 or uint16 (B, C, H, W), and explanations of the target's classes in them.

    An explainer that prepares, such as AnyHead, needs one pass for all classes; others need one for each.
    """

    def __init__(self, explainer: Explainer, target: TargetModel, images: Tensor) -> None:
        self.explainer = explainer
        self.target = target
        self.images = images
        self._explain: Callable[[Tensor], Tensor] | None = None
        self._functionals: PreparedFunctionals | None = None

    def scores(self) -> Tensor:
        """The scores of all classes, such as their probabilities, (B, K)."""
        return self.target.scores(self.target(self.images).float()).cpu()

    def heatmaps(self, classes: Sequence[int], against: Sequence[int] = ()) -> Tensor:
        """Explain one class in each image, on the CPU: heatmaps (B, rows, columns).

        With other classes, `against`, the logit of the class minus the mean of theirs is explained: by an explainer of
        functionals directly, by others as the difference of their heatmaps, which is the same for methods that are
        linear in the score.
        """
        if against and hasattr(self.explainer, "explain"):
            self._functionals = self._functionals or PreparedFunctionals(self.explainer, self.images)
            return self._functionals.heatmaps(partial(self._contrast, classes, against))
        heatmaps = self._explain_class(classes)
        others = [self._explain_class([other] * len(classes)) for other in against]
        return heatmaps - torch.stack(others).mean(0) if others else heatmaps

    def _contrast(self, classes: Sequence[int], against: Sequence[int], embeddings: Tensor) -> Tensor:
        """Compute v_a, of the class of each image, minus the mean v_b of the others: (B, D)."""
        of_classes = [torch.tensor(classes), *(torch.full((len(classes),), other) for other in against)]
        own, *others = [class_functionals(self.target, embeddings, each.to(embeddings.device)) for each in of_classes]
        return own - torch.stack(others).mean(0)

    def _explain_class(self, classes: Sequence[int]) -> Tensor:
        if self._explain is None:
            explainer = self.explainer
            if isinstance(explainer, PreparedExplainer):
                self._explain = explainer.prepare(self.images)
            else:
                self._explain = partial(explainer, self.images)
        name = getattr(self.explainer, "__name__", type(self.explainer).__name__)
        heatmaps = read_heatmaps(self._explain(torch.tensor(classes, device=self.images.device)), name)
        if heatmaps.shape[:1] != self.images.shape[:1] or heatmaps.dim() != 3:
            raise InputError(
                f"expected heatmaps (B, rows, columns) of {len(self.images)} images from {name}, got"
                f" {list(heatmaps.shape)}"
            )
        return heatmaps.float().cpu()


class PreparedTexts:
    """Images, uint8 or uint16 (B, C, H, W), with scores and explanations of texts, see `PreparedFunctionals`."""

    def __init__(self, explainer: Explainer, head: TextHead, images: Tensor) -> None:
        self.head = head
        self._functionals = PreparedFunctionals(explainer, images)

    @torch.no_grad()
    def scores(self, texts: Sequence[str]) -> Tensor:
        """Score the images by texts: (B, V)."""
        return self.head(self._functionals.embeddings, texts).float().cpu()

    def heatmaps(self, texts: Sequence[str], against: Sequence[str] = ()) -> Tensor:
        """Explain one text in each image, told apart from others, on the CPU: heatmaps (B, rows, columns)."""
        different = list(dict.fromkeys(texts))
        wanted = torch.tensor([different.index(text) for text in texts])

        def functionals(embeddings: Tensor) -> Tensor:
            of_all = self.head.functionals(embeddings.detach(), different, against or None)
            return of_all[torch.arange(len(of_all)), wanted.to(of_all.device)]

        return self._functionals.heatmaps(functionals)


def is_signed(explainer: Explainer, against: Sequence[Any] = ()) -> bool | None:
    """Whether values below 0 oppose what is explained, see `Explainer`; a difference of heatmaps always has a sign."""
    return True if against and not hasattr(explainer, "explain") else getattr(explainer, "signed", None)


def check_scores(scores: Tensor, names: Sequence[str], kind: str, model: str) -> None:
    """Raise an InputError that names the first image whose scores, (B, ...), are not finite."""
    for row, name in zip(scores, names, strict=True):
        if not row.isfinite().all():
            raise InputError(
                f"expected finite {kind} of {model} for {name}, got NaN or infinity: check its weights, and compute in"
                " float32 without autocast"
            )


def check_heatmaps(heatmaps: Tensor, names: Sequence[str], method: str) -> None:
    """Raise an InputError for heatmaps (B, rows, columns) that are not finite; warn of those that are constant."""
    for heatmap, name in zip(heatmaps, names, strict=True):
        if not heatmap.isfinite().all():
            raise InputError(
                f"expected a finite heatmap of {name}, got NaN or infinity from {method}: take another method, and"
                " compute in float32 without autocast"
            )
    equal = [name for name, same in zip(names, is_constant(heatmaps).tolist(), strict=True) if same]
    if equal and heatmaps[0].numel() > 1:
        shown = ", ".join(equal[:3]) + f" and {len(equal) - 3} more images" * (len(equal) > 3)
        warnings.warn(
            f"{method} gives every patch of {shown} the same score: the heatmap tells nothing; take another method, or"
            " another class",
            stacklevel=2,
        )
