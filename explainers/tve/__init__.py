"""TVE: learns the meta-attributions of a backbone once, then explains any classifier on that backbone."""

from explainers.tve.oracle import Oracle
from explainers.tve.paper_network import PaperNetwork
from explainers.tve.tve import TVE, LightNetwork, TVELoss

__all__ = ["TVE", "LightNetwork", "Oracle", "PaperNetwork", "TVELoss"]
