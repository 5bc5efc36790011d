"""TVE: learns the meta-attributions of a backbone once, then explains any classifier on that backbone."""

from explainers.tve.general import General
from explainers.tve.module import TVE
from explainers.tve.oracle import Oracle

__all__ = ["TVE", "General", "Oracle"]
