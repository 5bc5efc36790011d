"""Explainers without training."""

from explainers.posthoc.chance import Chance

__all__ = ["Chance"]
