"""Trains the models to explain."""

from explainers.targets.classifier import Classifier

__all__ = ["Classifier"]
