"""The model to explain: a head on a timm backbone, its files, and its outputs for images with hidden patches."""

from explainers.target.model import TargetModel

__all__ = ["TargetModel"]
