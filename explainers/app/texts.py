"""Texts in place of classes: where in an image is what a text describes?"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from explainers import VectorExplainer
from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.text import TextHead, clip_text_head
from explainers.text.encoders import checked_texts
from explainers.text.explaining import check_explains_functionals

IMAGE_TOWERS = ("clip", "siglip")
"""Parts of timm's names of models that were trained with texts."""


def text_head_of(target: TargetModel, head: TextHead | None = None) -> TextHead:
    """The text head of a model, on the model's device: a given one, or that of an image tower of CLIP or SigLIP.

    Raises:
        InputError: for a model that was not trained with texts, and what `clip_text_head` refuses.
    """
    if head is None:
        if not has_texts(target):
            raise InputError(
                f"expected an image tower of CLIP or SigLIP for texts, got {target.name}: take one, such as"
                " vit_base_patch16_clip_quickgelu_224.openai, or in a program a text_head, such as that of"
                " explainers.text.fit_text_head"
            )
        return clip_text_head(target).to(target.mean.device)
    if not isinstance(head, TextHead):
        raise InputError(f"expected text_head as a TextHead, got {type(head).__name__}: see explainers.text")
    head.check_fits(target)
    return head if head.device == target.mean.device else copy.deepcopy(head).to(target.mean.device)


def has_texts(target: TargetModel) -> bool:
    """Whether timm's name of a model says that it was trained with texts, and not fine-tuned for classes."""
    name = f"{target.name}.{target.backbone.pretrained_cfg.get('tag') or ''}"
    return any(word in name for word in IMAGE_TOWERS) and "_ft_" not in name


def is_image_tower(target: TargetModel) -> bool:
    """Whether a model was trained with texts and has no classes: its head is none, or projects embeddings to texts."""
    outputs = getattr(target.head, "out_features", 0)
    return has_texts(target) and outputs == target.backbone.pretrained_cfg.get("num_classes", 0)


class PreparedTexts:
    """A batch of images, of which texts are scored and explained.

    An explainer with vectors, such as AnyHead, needs one pass for all texts; others need one for each text.

    Args:
        explainer: an explainer of functionals.
        head: what turns texts into functionals.
        images: uint8, (B, 3, S, S).
        against: other texts, see `TextHead.functionals`.

    Raises:
        InputError: for an explainer that explains classes alone, such as RISE.
    """

    @torch.no_grad()
    def __init__(self, explainer: Any, head: TextHead, images: Tensor, against: Sequence[str] | None = None) -> None:
        self.explainer = explainer
        self.head = head
        self.images = images
        self.against = against
        self.vectors: Tensor | None = None
        if isinstance(explainer, VectorExplainer) and not getattr(explainer, "refine", 0):
            self.vectors, embeddings = explainer.decompose(images)
        else:
            check_explains_functionals(explainer)
            embeddings = explainer.target.embed(explainer.target.normalise(images))
        self.embeddings = embeddings.float()

    def told_apart(self, against: Sequence[str] | None) -> "PreparedTexts":
        """The same images, whose texts are told apart from others; it shares what was computed."""
        twin = copy.copy(self)
        twin.against = against
        return twin

    @torch.no_grad()
    def scores(self, texts: Sequence[str]) -> Tensor:
        """Score the images by texts: (B, V)."""
        return self.head(self.embeddings, texts).float().cpu()

    @torch.no_grad()
    def heatmaps(self, texts: Sequence[str], rows: slice = slice(None)) -> Tensor:
        """Explain one text in each image, or in each of the images of `rows`: (B, P, P)."""
        different = list(dict.fromkeys(texts))
        wanted = torch.tensor([different.index(text) for text in texts])

        def functionals(embeddings: Tensor) -> Tensor:
            of_all = self.head.functionals(embeddings.detach(), different, self.against)
            return of_all[torch.arange(len(of_all)), wanted.to(of_all.device)][:, None]

        if self.vectors is None:
            return self.explainer.explain(self.images[rows], functionals)[:, 0].float().cpu()
        scores = functionals(self.embeddings[rows]) @ self.vectors[rows].float().mT
        return scores[:, 0].unflatten(-1, (self.explainer.grid.side, -1)).cpu()

    def heatmap(self, row: int, _: int, text: str) -> Tensor:
        """Explain a text in one of the images, with the arguments of `Explanation.heatmap_of`: (P, P)."""
        return self.heatmaps([text], slice(row, row + 1))[0]

    def score(self, row: int, text: str) -> Tensor:
        """Score one of the images by a text: (1,)."""
        return self.scores([text])[row]


def texts_of(text: Any, against: Any) -> tuple[list[str], list[str] | None]:
    """The texts to explain, each once, and those that they are told apart from; an InputError for what is no text."""
    texts = list(dict.fromkeys(checked_texts(text)))
    return texts, None if against is None else checked_texts(against)


def in_words(against: Sequence[str] | None) -> str:
    """What texts are told apart from, for titles.

    >>> in_words(["a dog"]), in_words(["a dog", "a bird"]), in_words(None)
    ('a dog', '2 texts', '')
    """
    return "" if against is None else against[0] if len(against) == 1 else f"{len(against)} texts"
