"""Heads of texts that a fit has not seen: a measurement of text heads (docs/results/words.md)."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.text import TextExplainer, TextHead
from explainers.text.encoders import stored_encoder, text_embeddings
from explainers.text.fitting import RIDGE, class_rows_of_texts, unseen_rows


def unseen_head(target: TargetModel, embeddings: str | Path, prompts: str | Path, ridge: float = RIDGE) -> nn.Linear:
    """A linear head in which the row of every class comes from its text alone, by a fit to the other classes.

    Args:
        target: a classifier with a linear head of K classes.
        embeddings: safetensors file of embeddings of texts, see `stored_encoder`.
        prompts: JSON file of these texts, whose entry `imagenet` lists the text of each class.
        ridge: λ of the regression.
    """
    texts = json.loads(Path(prompts).read_text(encoding="utf-8"))["imagenet"]
    rows = class_rows_of_texts(target, texts)
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
