"""The projection W of a fixed head from the text embeddings of class names, by the text tower of CLIP or SigLIP."""

import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.names import readable_names
from explainers.text.encoders import TEMPLATES, open_clip_encoder, text_embeddings
from explainers.text.towers import text_tower
from explainers.vectors.fixed_head import projected_head
from explainers.vectors.projections import embedded_images


def text_of(
    target: TargetModel,
    data: Any,
    model: str | None = None,
    pretrained: str | None = None,
    templates: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    images: int = 200,
) -> Tensor:
    """Compute text embeddings W of the classes of a datamodule, (K, D'), and print how many images these classify well.

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
            " module.projection.names, or take images with classes"
        )
    tower = text_tower(target, model, pretrained)
    prompts = (getattr(data, "templates", ()) or TEMPLATES) if templates is None else templates
    weight = text_embeddings(open_clip_encoder(*tower), names or readable_names(data.classes), prompts)
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
