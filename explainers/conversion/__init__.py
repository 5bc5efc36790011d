"""Models of other libraries as models to explain."""

from explainers.conversion.convert import as_target

__all__ = ["as_target"]
