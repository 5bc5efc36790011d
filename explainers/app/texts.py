"""Texts in place of classes: where in an image is what a text describes?"""

import copy
from collections.abc import Sequence
from typing import Any

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.text import TextHead, clip_text_head
from explainers.text.encoders import checked_texts

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


def texts_of(text: Any, against: Any) -> tuple[list[str], list[str] | None]:
    """The texts to explain, each once, and those that they are told apart from; an InputError for what is no text."""
    texts = list(dict.fromkeys(checked_texts(text)))
    return texts, None if against is None else checked_texts(against)


def summarise(against: Sequence[str] | None) -> str:
    """What texts are told apart from, for titles.

    >>> summarise(["a dog"]), summarise(["a dog", "a bird"]), summarise(None)
    ('a dog', '2 texts', '')
    """
    return "" if against is None else against[0] if len(against) == 1 else f"{len(against)} texts"
