"""One call: `explainers.explain("photo.jpg", "vit_tiny_patch16_224")`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from explainers.app.choosing import Purpose
from explainers.app.comparing import Comparison, compared, mean_embedding
from explainers.app.explanation import Explanation
from explainers.app.photos import is_single
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.text import TextHead


def explain(
    images: Any,
    model: Any,
    *,
    classes: Any = None,
    method: Any = "auto",
    weights: str | Path | None = None,
    top: int = 5,
    device: str | torch.device | None = None,
    text: str | Sequence[str] | None = None,
    against: Any = None,
    text_head: TextHead | None = None,
    similar_to: Any = None,
) -> Explanation | Comparison | list[Explanation] | list[Comparison]:
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
            With `similar_to`, a folder or a list of images, whose mean embedding is what all images have in common: the
            likeness is relative to it.
        text_head: what turns texts into functionals of the embedding; `None` for that of CLIP and SigLIP.
        similar_to: another image: why are the images like it? The model needs no head.

    Returns:
        One `Explanation`; a list for a folder, a list or a batch. With `similar_to`, a `Comparison`.

    Raises:
        InputError: for images that cannot be read, and for what the model or the method cannot explain.
    """
    if similar_to is not None:
        given = {"classes": classes, "text": text, "text_head": text_head}
        others = [name for name, value in given.items() if value is not None]
        if others:
            raise InputError(f"expected similar_to or {others[0]}, got both: leave out one of them")
        comparing = Session(model, method, weights, device, purpose="likeness")
        centre = None if against is None else mean_embedding(comparing, against)
        comparisons = list(compared(comparing, images, similar_to, centre))
        return comparisons[0] if is_single(images) else comparisons
    if text is None and text_head is not None:
        raise InputError("expected text beside text_head, got text_head alone: give text=")
    purpose: Purpose = "classes" if text is None else "texts"
    session = Session(model, method, weights, device, text_head, purpose)
    explanations = session.explain(images, classes, top, text, against)
    return explanations[0] if is_single(images) else explanations
