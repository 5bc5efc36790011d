"""An open vocabulary for any classifier: text heads that are fitted to the rows of its own head."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.functionals import class_rows
from explainers.text.encoders import AS_IT_IS, Encoder, text_embeddings
from explainers.text.heads import TextHead
from explainers.text.ridge import FOLDS, RIDGE, held_out_accuracy, ridge_map, unseen_rows


def fit_text_head(
    target: TargetModel,
    texts: Sequence[str],
    encode: Encoder,
    *,
    labelled: tuple[Tensor, Tensor] | None = None,
    ridge: float = RIDGE,
    templates: Sequence[str] = AS_IT_IS,
) -> TextHead:
    """Give a classifier an open vocabulary: a linear map from embeddings of texts to functionals of its embedding.

    Ridge regression maps the text of each class to its row of the head. A text that is no class then has a functional,
    too. How well this generalises is printed: the accuracy among classes that the fit did not see, or without labelled
    images the cosine of their rows. Texts without a relative among the classes have meaningless functionals.

    Args:
        target: a classifier with a linear head of K classes.
        texts: K texts, one for each class in the order of the logits, such as `a photo of a tench`.
        encode: embeds texts, see `Encoder`.
        labelled: embeddings (B, D) of labelled images, and their labels (B,), for the accuracy.
        ridge: λ of the regression.
        templates: see `TextHead`.

    Raises:
        InputError: unless there is one text for each class, or for a head that is not linear.
    """
    rows = class_rows_of_texts(target, texts)
    embedded = text_embeddings(encode, texts, templates).to(rows.device)
    centre = embedded.mean(0)
    projection = ridge_map(embedded - centre, rows, ridge)
    folds = min(FOLDS, len(rows))
    unseen = unseen_rows(embedded, rows, ridge, folds)
    if labelled is None:
        cosine = F.cosine_similarity(rows, unseen, dim=-1).mean().item()
        print(f"text head: mean cosine {cosine:.2f} of the rows of unseen classes with those from their text")
    else:
        print(held_out_accuracy(*labelled, unseen, folds))
    return TextHead(encode, projection, centre, normalise=False, templates=templates)


def class_rows_of_texts(target: TargetModel, texts: Sequence[str]) -> Tensor:
    """The rows of a linear head relative to their mean, (K, D), one for each text."""
    rows = class_rows(target.head, target.embed_dim, target.mean).float()
    if len(texts) != len(rows):
        raise InputError(f"expected {len(rows)} texts, one for each class of {target.name}, got {len(texts)}")
    return rows - rows.mean(0)
