"""An open vocabulary for any classifier: text heads that are fitted to the rows of its own head."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.functionals import class_rows
from explainers.text.encoders import AS_IT_IS, Encoder, stored_encoder, text_embeddings
from explainers.text.explaining import TextExplainer
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
    rows = _rows(target, texts)
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


def unseen_head(target: TargetModel, embeddings: str | Path, prompts: str | Path, ridge: float = RIDGE) -> nn.Linear:
    """A linear head in which the row of every class comes from its text alone, by a fit to the other classes.

    Args:
        target: a classifier with a linear head of K classes.
        embeddings: safetensors file of embeddings of texts, see `stored_encoder`.
        prompts: JSON file of these texts, whose entry `imagenet` lists the text of each class.
        ridge: λ of the regression.
    """
    texts = json.loads(Path(prompts).read_text(encoding="utf-8"))["imagenet"]
    rows = _rows(target, texts)
    embedded = text_embeddings(stored_encoder(embeddings, prompts), texts).to(rows.device)
    head = nn.Linear(target.embed_dim, len(rows), bias=False)
    head.load_state_dict({"weight": unseen_rows(embedded, rows, ridge)})
    return head


def unseen_texts(
    target: TargetModel,
    grid: PatchGrid,
    explainer: Callable[..., Any],
    embeddings: str | Path,
    prompts: str | Path,
    ridge: float = RIDGE,
    other: bool = False,
    classifier: TargetModel | None = None,
) -> TextExplainer:
    """Explain each class by its text alone, by a fit that has not seen it: a measurement of text heads.

    For other arguments see `unseen_head`.

    Args:
        target: the model to explain, with K classes.
        grid: the patches that are explained.
        explainer: builds an explainer of functionals from `target` and `grid`.
        other: explain the text of another class, drawn at random: a control, because heatmaps of any text mark what is
            salient.
        classifier: the model to whose head the text head is fitted; `None` for `target`.
    """
    rows = unseen_head(classifier or target, embeddings, prompts, ridge).weight.detach()
    if other:
        rows = rows[_others(len(rows))]
    head = TextHead(_no_encoder, normalise=False)
    return TextExplainer(explainer(target=target, grid=grid), head, rows.to(target.mean.device))


def _others(count: int) -> Tensor:
    """Another class for each of `count` classes: each follows the one before it in a random cycle."""
    cycle = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    others = torch.empty_like(cycle)
    others[cycle] = cycle.roll(1)
    return others


def _no_encoder(texts: Sequence[str]) -> Tensor:
    raise InputError(f"expected one of the classes, got the text {texts[0]!r:.60}: make a head by fit_text_head")


def _rows(target: TargetModel, texts: Sequence[str]) -> Tensor:
    """The rows of a linear head relative to their mean, (K, D), one for each text."""
    rows = class_rows(target.head, target.embed_dim, target.mean).float()
    if len(texts) != len(rows):
        raise InputError(f"expected {len(rows)} texts, one for each class of {target.name}, got {len(texts)}")
    return rows - rows.mean(0)
