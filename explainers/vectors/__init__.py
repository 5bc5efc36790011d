"""Explainability vectors: add the ability to explain itself to a model by arithmetic on weights."""

from explainers.vectors.explainability_vector import ExplainabilityVector, MethodLabels, Selection
from explainers.vectors.model_files import exported_target
from explainers.vectors.projections import prototypes_of, simplex_of, text_of
from explainers.vectors.self_distillation import SelfDistillation
from explainers.vectors.self_explaining import HeadBuilder, SelfExplaining, SelfExplainingTraining
from explainers.vectors.vector_files import available
from explainers.vectors.vector_sources import VectorSources

__all__ = [
    "ExplainabilityVector",
    "HeadBuilder",
    "MethodLabels",
    "SelfDistillation",
    "SelfExplaining",
    "SelfExplainingTraining",
    "Selection",
    "VectorSources",
    "available",
    "exported_target",
    "prototypes_of",
    "simplex_of",
    "text_of",
]
