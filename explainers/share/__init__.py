"""Trained explainers as folders and on the Hugging Face Hub; targets as other libraries call models."""

from typing import TYPE_CHECKING

from explainers import import_at_use
from explainers.share.catalogue import available

if TYPE_CHECKING:
    from explainers.share.pretrained import Pretrained, load
    from explainers.share.views import NormalisedModel

# They need torch, which takes seconds; `explainers list` needs `available` alone
__getattr__ = import_at_use(__name__, "views", "pretrained")

__all__ = ["NormalisedModel", "Pretrained", "available", "load"]
