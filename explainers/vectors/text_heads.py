"""The projection W of a fixed head from the text embeddings of class names, by the text tower of CLIP or SigLIP."""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError
from explainers.target import TargetModel
from explainers.target.names import readable_names
from explainers.vectors.fixed_head import projected_head
from explainers.vectors.projections import embedded_images
from explainers.vectors.towers import require_open_clip, text_tower

TEMPLATES = ("a photo of a {}.", "a photo of the {}.", "a close-up of a {}.", "a blurry picture of a {}.")
"""Prompts for data sets that have none of their own."""


def text_embeddings(model: str, pretrained: str, classes: Sequence[str], templates: Sequence[str]) -> Tensor:
    """The direction of the text embedding of each class, averaged over templates: unit vectors (K, D').

    Args:
        model: open_clip's name of an architecture.
        pretrained: open_clip's name of its weights, or a file; empty for random weights.
        classes: names of the classes.
        templates: prompts, with `{}` where the name of the class belongs.

    Raises:
        InputError: if a package is not installed, or a template has no place for the name.
    """
    without = [template for template in templates if "{}" not in template]
    if without or not templates:
        raise InputError(f"expected templates with {{}} for the name, as 'a photo of a {{}}.', got {without or 'none'}")
    clip, tokenise = _open(model, pretrained)
    means = []
    for name in classes:
        prompts = [template.replace("{}", name) for template in templates]
        with torch.no_grad():
            embeddings = clip.encode_text(tokenise(prompts))
        means.append(F.normalize(embeddings, dim=-1).mean(0))
    return F.normalize(torch.stack(means), dim=-1)


def _open(model: str, pretrained: str) -> tuple[Any, Any]:
    """Build a model of open_clip and its tokeniser, without the log of it."""
    open_clip = require_open_clip()
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        tokenise = open_clip.get_tokenizer(model)
        return open_clip.create_model(model, pretrained=pretrained or None).eval(), tokenise
    except ImportError as error:  # SigLIP's tokenisers
        raise InputError(f"the tokeniser of {model} needs transformers: pip install transformers") from error
    finally:
        logging.disable(disabled)


def text_of(
    target: TargetModel,
    data: Any,
    model: str | None = None,
    pretrained: str | None = None,
    templates: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    images: int = 200,
) -> Tensor:
    """Compute `text_embeddings` for the classes of a datamodule, and print how many images they classify correctly.

    Args:
        target: the base model, the image tower.
        data: the datamodule.
        model: see `text_tower`.
        pretrained: see `text_tower`.
        templates: see `text_embeddings`; `None` for those of the datamodule, or `TEMPLATES` if it has none.
        names: names to put into the prompts, in the order of the labels; `None` for `readable_names` of the classes.
        images: maximum number of validation images for the printed accuracy; 0 for none.

    Raises:
        InputError: if image and text tower are not of one model, or the number of names is not the number of classes.
    """
    if not data.classes or (names is not None and len(names) != len(data.classes)):
        raise InputError(
            f"expected names of the {len(data.classes)} classes {data.classes}, got {len(names or ())}: set"
            " explainer.projection.names, or take images with classes"
        )
    tower = text_tower(target, model, pretrained)
    prompts = (getattr(data, "templates", ()) or TEMPLATES) if templates is None else templates
    weight = text_embeddings(*tower, names or readable_names(data.classes), prompts)
    if images:
        tell_accuracy(target, data, weight, images)
    return weight


@rank_zero_only
def tell_accuracy(target: TargetModel, data: Any, weight: Tensor, limit: int) -> None:
    """Print the accuracy of a text head on validation images; warn if it is not two standard errors above chance."""
    if not hasattr(data, "dataset"):
        return print(f"text head: accuracy not measured, because {type(data).__name__} reads no single images")
    embeddings, labels = embedded_images(target, data, "val", limit)
    head = projected_head(target, weight.to(target.mean.device), True, 1.0, "patch", 1.0).cpu()
    accuracy = (head(embeddings).argmax(-1) == labels).float().mean().item()
    chance = 1 / len(weight)
    percent = f"{100 * accuracy:.3g} %"
    print(f"text head: {percent} on {len(labels)} validation images (chance {100 * chance:.2g} %)")
    if accuracy < chance + 2 * (chance * (1 - chance) / len(labels)) ** 0.5:
        warnings.warn(
            f"the accuracy of the text head, {percent}, is not clearly above chance: are image and text tower of one"
            " model, with its weights, and do the prompts fit the images?",
            stacklevel=2,
        )
