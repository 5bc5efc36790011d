"""What every LightningModule of this project shares, written once."""

from explainers.training.module import TrainingModule
from explainers.training.optimisation import warmup_cosine, warmup_linear

__all__ = ["TrainingModule", "warmup_cosine", "warmup_linear"]
