"""Explainers that need no training."""

from explainers.posthoc.chance import Chance

__all__ = ["Chance"]
