"""Trained explainers as folders and on the Hugging Face Hub."""

from explainers.share.catalogue import available
from explainers.share.loadable import Loadable
from explainers.share.pretrained import Pretrained, load

__all__ = ["Loadable", "Pretrained", "available", "load"]
