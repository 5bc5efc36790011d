"""The zero-shot classifier of an image tower of CLIP or SigLIP: a head whose classes are texts."""

from collections.abc import Callable, Sequence

from timm.data import ImageNetInfo

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.heads import ProjectedHead
from explainers.models.names import readable_names
from explainers.text.encoders import text_embeddings
from explainers.text.heads import TextHead, clip_text_head
from explainers.text.towers import require_open_clip


def zero_shot_head(
    target: TargetModel,
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    templates: Sequence[str] | None = None,
    text_head: Callable[[TargetModel], TextHead] | None = None,
) -> ProjectedHead:
    """Make the classes of a data set the classes of an image tower, by the texts of their names.

    The logits are 100 times the cosine of the image and the mean embedding of the prompts of each class. By default the
    classes are ImageNet's, with the names and the 80 templates of OpenAI, which open_clip has: 80,000 texts.

    Args:
        target: the image tower.
        classes: names of the classes in the data set, in the order of the labels; `None` for `names`, or without them
            for ImageNet's 1000.
        names: what stands for the classes in the prompts; `None` for `readable_names` of `classes`.
        templates: prompts, with `{}` where the name belongs; `None` for OpenAI's, such as `a bad photo of a {}.`
        text_head: builds the text head of the tower; `None` for `clip_text_head`. Its own templates are not read.

    Returns:
        The head, whose `class_names` are those of the data set.

    Raises:
        InputError: unless there is one name for each class, or if open_clip is needed and not installed.
    """
    if classes is None and names is None:
        classes = ImageNetInfo("imagenet-1k").label_names()  # numbers of WordNet, in the order of the labels
        names = require_open_clip().IMAGENET_CLASSNAMES
    classes = list(names or () if classes is None else classes)
    names = readable_names(classes) if names is None else list(names)
    if len(names) != len(classes) or len(names) < 2:
        raise InputError(
            f"expected a name for each of at least 2 classes, got {len(classes)} classes and {len(names)} names"
        )
    if templates is None:
        templates = [template("{}") for template in require_open_clip().OPENAI_IMAGENET_TEMPLATES]
    texts = clip_text_head(target) if text_head is None else text_head(target)
    head = texts.head(text_embeddings(texts.encode, names, templates))
    head.class_names = tuple(classes)
    return head
