"""AnyHead: one vector of every patch, whose product with any class of any linear head is the heatmap of that class."""

from explainers.anyhead.anyhead import AnyHead
from explainers.anyhead.coalition_teacher import CoalitionTeacher
from explainers.anyhead.network import AnyHeadNetwork
from explainers.anyhead.propagation_teacher import PropagationTeacher

__all__ = ["AnyHead", "AnyHeadNetwork", "CoalitionTeacher", "PropagationTeacher"]
