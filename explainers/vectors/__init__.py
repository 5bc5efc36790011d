"""Explainability vectors: add the ability to explain itself to a model by arithmetic on weights."""

from explainers.vectors.explainability_vector import ExplainabilityVector, MethodLabels
from explainers.vectors.model_files import exported_target
from explainers.vectors.projections import prototypes_of, simplex_of, text_of
from explainers.vectors.self_explaining import SelfExplaining
from explainers.vectors.vector_files import available

__all__ = [
    "ExplainabilityVector",
    "MethodLabels",
    "SelfExplaining",
    "available",
    "exported_target",
    "prototypes_of",
    "simplex_of",
    "text_of",
]
