"""The model of a session, with weights of its own or shared ones, and its text head."""

import copy
from typing import Any

import torch
from torch import nn

from explainers.errors import InputError
from explainers.models import TargetModel, as_target
from explainers.models.heads import TextProjection
from explainers.models.wrappers import share_weights
from explainers.text import TextHead, clip_text_head
from explainers.text.encoders import clip_encoder

IMAGE_TOWERS = ("clip", "siglip")
"""Parts of timm's names of models that were trained with texts."""


def prepare_model(model: str | nn.Module) -> TargetModel:
    """Build the model to explain, in eval mode, on a GPU for a name; its weights need no gradients.

    The caller's model stays as it is; a `TargetModel` shares its weights.
    """
    device = "cuda" if isinstance(model, str) and torch.cuda.is_available() else None
    target = as_target(model, device=device)
    target = _share_weights(target) if target is model else target
    return target.eval().requires_grad_(False)


def _share_weights(target: TargetModel) -> TargetModel:
    """A model with modules of its own, whose mode and hooks can change, and with the tensors of another one.

    Weights that were made inside `torch.inference_mode`, which autograd refuses, are copied.
    """
    if any(weight.is_inference() for weight in [*target.parameters(), *target.buffers()]):
        return target.copied()
    shared = share_weights(target) | {id(buffer): buffer.detach() for buffer in target.buffers()}
    own = copy.deepcopy(target, shared)
    own.origin = target.origin
    return own


def own_text_head(model: Any, target: TargetModel) -> TextHead | None:
    """The text head of a model of CLIP whose image tower is the target; `None` for other models."""
    if not hasattr(model, "encode_text"):
        return None
    return clip_text_head(target, encode=clip_encoder(model))


def find_text_head(target: TargetModel, head: TextHead | None = None) -> TextHead:
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
    if isinstance(target.head, TextProjection):
        return True
    outputs = getattr(target.head, "out_features", 0)
    return has_texts(target) and outputs == target.backbone.pretrained_cfg.get("num_classes", 0)
