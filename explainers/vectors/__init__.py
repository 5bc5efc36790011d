"""Explainability vectors: add the ability to explain itself to a model by arithmetic on weights."""

from explainers.vectors.explainability_vector import ExplainabilityVector, Selection
from explainers.vectors.model_files import exported_target
from explainers.vectors.self_distillation import SelfDistillation
from explainers.vectors.self_explaining import SelfExplaining, SelfExplainingTraining
from explainers.vectors.vector_files import VectorSources, available

__all__ = [
    "ExplainabilityVector",
    "SelfDistillation",
    "SelfExplaining",
    "SelfExplainingTraining",
    "Selection",
    "VectorSources",
    "available",
    "exported_target",
]
