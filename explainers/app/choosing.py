"""Chooses the explainer that fits a model."""

from typing import Any

from explainers import Explainer
from explainers.target import TargetModel


def choose(target: TargetModel, method: Any = "auto") -> tuple[Explainer, str]:
    """Build an explainer of a model.

    Args:
        target: the model to explain.
        method: `auto`; the name of a shipped explainer, such as `anyhead`; a method of `explainers.posthoc`, such as
            `RISE`, or with options `{"RISE": {"masks": 500}}`; the folder of a trained explainer; or an explainer.

    Returns:
        The explainer, and its label.
    """
    raise NotImplementedError
