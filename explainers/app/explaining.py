"""One call: `explainers.explain("photo.jpg", "vit_tiny_patch16_224")`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import overload

import torch
from torch import nn

from explainers.app.choosing import Method
from explainers.app.explanation import Explanation
from explainers.app.photos import Images, OneImage, is_single
from explainers.app.session import Classes, Session
from explainers.errors import InputError
from explainers.text import TextHead


@overload
def explain(  # type: ignore[overload-overlap]  # a text is a path, although it is iterable, too
    images: OneImage,
    model: str | nn.Module,
    *,
    classes: Classes = ...,
    method: Method = ...,
    weights: str | Path | None = ...,
    top: int = ...,
    device: str | torch.device | None = ...,
    text: str | Sequence[str] | None = ...,
    against: str | Sequence[str] | None = ...,
    text_head: TextHead | None = ...,
) -> Explanation: ...


@overload
def explain(
    images: Iterable[OneImage],
    model: str | nn.Module,
    *,
    classes: Classes = ...,
    method: Method = ...,
    weights: str | Path | None = ...,
    top: int = ...,
    device: str | torch.device | None = ...,
    text: str | Sequence[str] | None = ...,
    against: str | Sequence[str] | None = ...,
    text_head: TextHead | None = ...,
) -> list[Explanation]: ...


def explain(
    images: Images,
    model: str | nn.Module,
    *,
    classes: Classes = None,
    method: Method = "auto",
    weights: str | Path | None = None,
    top: int = 5,
    device: str | torch.device | None = None,
    text: str | Sequence[str] | None = None,
    against: str | Sequence[str] | None = None,
    text_head: TextHead | None = None,
) -> Explanation | list[Explanation]:
    """Explain what a model sees in images.

    To explain images again and again with one model, make a `Session`, which builds the model once.

    Args:
        images: a path, a folder (with all folders below it), a PIL image, uint8 pixels as an array or a tensor, or a
            list of them. The model sees the square in the centre.
        model: a name of timm, a module, or a `TargetModel`. It is not changed.
        classes: the class to explain, by name or index, or one for each image; `None` for the predicted ones.
        method: `auto` takes a trained explainer if one is shipped for this backbone, else the method that fits best. Or
            a method of `explainers.posthoc`, the folder of a trained explainer, or an explainer, see `choose`.
        weights: file of the model's weights; `None` for those of timm.
        top: number of most probable classes that an explanation lists.
        device: where to compute; `None` for the model's device, or a GPU for a name of timm.
        text: where is what a text describes? A text, or several, of which that with the highest similarity is
            explained, like the most probable class; `explanation.of(...)` explains another one, or any further text.
        against: a text, or several, such as other names: the heatmap shows what tells the text apart from their mean.
        text_head: what turns texts into functionals of the embedding; `None` for that of CLIP and SigLIP.

    Returns:
        An `Explanation` of one image; a list for a list, a folder, or a batch in one array. A type checker cannot tell
        a folder from a file, nor a batch from an image: there, put it into a list, as in `explain(["photos/"], model)`.

    Raises:
        InputError: for images that cannot be read, and for what the model or the method cannot explain.
    """
    if text is None and text_head is not None:
        raise InputError("text_head= needs text=")
    session = Session(model, method, weights, device, text_head, "classes" if text is None else "texts")
    explanations = session.explain(images, classes, top, text, against)
    return explanations[0] if is_single(images) else explanations
