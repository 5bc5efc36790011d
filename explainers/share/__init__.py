"""Trained explainers as folders and on the Hugging Face Hub."""

from explainers.share.pretrained import Pretrained, load
from explainers.share.reading import INITIAL_WEIGHTS

__all__ = ["INITIAL_WEIGHTS", "Pretrained", "load"]
