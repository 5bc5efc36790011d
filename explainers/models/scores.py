"""What the outputs of a model mean, and how they become probabilities, their logarithms and log-odds."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError

Score = Literal["softmax", "sigmoid", "value"]
"""One class of several; several classes at once, each with its own probability; or numbers, as of a regression."""


def scale_logits(logits: Tensor, score: Score) -> Tensor:
    """Turn logits (..., K) into scores of the same shape: probabilities, or for `value` the logits as they are.

    >>> [scale_logits(torch.zeros(2), score).tolist() for score in ("softmax", "sigmoid", "value")]
    [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]
    """
    if score == "value":
        return logits
    return logits.softmax(-1) if score == "softmax" else logits.sigmoid()


def log_probabilities(logits: Tensor, score: Score) -> Tensor:
    """Compute the logarithms of the probabilities of all classes, (..., K), exact for small ones; NaN for `value`."""
    if score == "value":
        return torch.full_like(logits, torch.nan)
    return logits.log_softmax(-1) if score == "softmax" else F.logsigmoid(logits)


def log_odds(logits: Tensor, classes: Tensor, score: Score) -> Tensor:
    """Compute log p / (1 − p) of one class (B,) of each image, from logits (B, K): (B,), exact for p near 0 or 1.

    For `sigmoid`, and for a single logit, this is the logit.

    >>> log_odds(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]), "sigmoid").tolist()
    [2.0]
    """
    own = classes[:, None]
    of_class = logits.gather(-1, own)[:, 0]
    if score == "sigmoid" or logits.shape[-1] == 1:
        return of_class
    return of_class - logits.scatter(-1, own, -torch.inf).logsumexp(-1)


def check_probabilities(target: Any, setting: str, otherwise: str, *settings: str) -> None:
    """Raise an InputError about a setting that needs probabilities, unless the target has some; it names another."""
    if target.score == "value":
        raise InputError(
            f"{setting} needs probabilities, but score=value of {target.name} has none: {otherwise}", *settings
        )
