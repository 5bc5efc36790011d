"""Both towers of models of Hugging Face transformers: a model to explain, and its text head."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from explainers.errors import InputError
from explainers.models import TargetModel, as_target
from explainers.text.encoders import AS_IT_IS, TEMPLATES, transformers_encoder
from explainers.text.heads import TextHead, clip_text_head


def two_towers(
    model: Any,
    tokeniser: Callable[..., Any],
    templates: Sequence[str] = AS_IT_IS,
    image_size: int | None = None,
) -> tuple[TargetModel, TextHead]:
    """Make the two towers of CLIP, TinyCLIP or SigLIP a model to explain and its text head.

    The image tower is computed in timm's architecture, see `as_target`; the text tower stays the caller's. The score of
    an image and a text is the cosine that the model computes.

    Args:
        model: a `CLIPModel` or `SiglipModel` of transformers.
        tokeniser: its tokeniser or processor, from `AutoTokenizer.from_pretrained` of the same name.
        templates: see `TextHead`.
        image_size: see `as_target`.

    Raises:
        InputError: for another model.
    """
    name = type(model).__name__
    if name not in ("CLIPModel", "SiglipModel"):
        raise InputError(
            f"expected a model of transformers with two towers, CLIPModel or SiglipModel, got {name}: for an image"
            " tower of timm take clip_text_head(target)"
        )
    images = _with_projection(model) if name == "CLIPModel" else model.vision_model
    target = as_target(images, image_size=image_size)
    head = clip_text_head(target, templates=templates, encode=transformers_encoder(model, tokeniser))
    head.scale = model.logit_scale.exp().item()
    return target, head


def hugging_face_text_head(target: TargetModel, name: str, templates: Sequence[str] = TEMPLATES) -> TextHead:
    """The text head of an image tower of timm, by the text tower of a model on the Hugging Face Hub.

    For towers that open_clip lacks, such as TinyCLIP's: `wkcn/TinyCLIP-ViT-8M-16-Text-3M-YFCC15M`.

    Args:
        target: the image tower; that it belongs to the text tower is not checked.
        name: name of a model with two towers, or its folder.
        templates: see `TextHead`.

    Raises:
        InputError: if transformers is not installed, or cannot load the model.
    """
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise InputError(f"the text tower of {name} needs transformers: pip install transformers") from error
    try:
        model, tokeniser = (kind.from_pretrained(name) for kind in (AutoModel, AutoTokenizer))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"expected a model of the Hugging Face Hub, or a folder, got {name}: {reason:.200}") from error
    return clip_text_head(target, templates=templates, encode=transformers_encoder(model, tokeniser))


def _with_projection(model: Any) -> nn.Module:
    """CLIP's image tower with its projection, made of the parts of a model."""
    from transformers import CLIPVisionModelWithProjection

    config = copy.deepcopy(model.config.vision_config)
    config.projection_dim = model.config.projection_dim
    tower: Any = CLIPVisionModelWithProjection(config)
    tower.vision_model = model.vision_model
    tower.visual_projection = model.visual_projection
    return tower
