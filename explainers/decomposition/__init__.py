"""Our own transferable explainer: the embedding as a sum of patches, taught by any embedding-valued attribution."""

from explainers.decomposition.coalitions import Coalitions
from explainers.decomposition.module import Decomposition
from explainers.decomposition.propagation import Propagation

__all__ = ["Coalitions", "Decomposition", "Propagation"]
