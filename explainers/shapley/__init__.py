"""Shapley values of patches: fitted (KernelSHAP), or learned (ViT-Shapley, FastSHAP)."""

from explainers.shapley.kernel_shap import KernelSHAP, ShapleyLabels
from explainers.shapley.module import Shapley
from explainers.shapley.surrogate import Surrogate

__all__ = ["KernelSHAP", "Shapley", "ShapleyLabels", "Surrogate"]
