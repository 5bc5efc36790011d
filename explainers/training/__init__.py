"""What trainings share: optimisation, random crops, frozen parts, checkpoints."""

from typing import TYPE_CHECKING

from explainers import import_at_use
from explainers.training.optimisation import warmup_cosine, warmup_linear

if TYPE_CHECKING:
    from explainers.training.classifier import Classifier
    from explainers.training.training_module import ExplainerTraining, TrainingModule

__getattr__ = import_at_use(__name__, "classifier", "training_module")
"""LightningModules are imported at first use, because explaining images does without Lightning."""

__all__ = ["Classifier", "ExplainerTraining", "TrainingModule", "warmup_cosine", "warmup_linear"]
