"""TVE: learn once per backbone what it sees of every patch neighbourhood, then explain any classifier on it."""

from explainers.tve.general import General
from explainers.tve.module import TVE
from explainers.tve.oracle import Oracle

__all__ = ["TVE", "General", "Oracle"]
