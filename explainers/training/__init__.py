"""Code that all LightningModules of this project share: optimisation, random crops, frozen parts, checkpoints."""

from explainers.training.classifier import Classifier
from explainers.training.network_explainer import NetworkExplainer
from explainers.training.optimisation import warmup_cosine, warmup_linear
from explainers.training.training_module import TrainingModule

__all__ = ["Classifier", "NetworkExplainer", "TrainingModule", "warmup_cosine", "warmup_linear"]
