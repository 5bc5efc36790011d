"""Code that all LightningModules of this project share: optimisation, random crops, frozen parts, checkpoints."""

from explainers.training.module import NetworkExplainer, TrainingModule
from explainers.training.optimisation import warmup_cosine, warmup_linear

__all__ = ["NetworkExplainer", "TrainingModule", "warmup_cosine", "warmup_linear"]
