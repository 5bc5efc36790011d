"""Trained explainers as folders and on the Hugging Face Hub."""

from explainers.pretrained.folders import Pretrained, load
from explainers.pretrained.reading import INITIAL_WEIGHTS

__all__ = ["INITIAL_WEIGHTS", "Pretrained", "load"]
