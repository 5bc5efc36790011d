"""The model to explain: a head on a timm backbone, found in what a user gives, and its outputs for hidden patches."""

from explainers.models.convert import as_target
from explainers.models.model import TargetModel

__all__ = ["TargetModel", "as_target"]
