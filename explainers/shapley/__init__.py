"""Shapley values of patches, fitted by KernelSHAP or learned by ViT-Shapley and FastSHAP."""

from explainers.shapley.kernel_shap import KernelSHAP, ShapleyLabels
from explainers.shapley.module import Shapley
from explainers.shapley.surrogate import Surrogate

__all__ = ["KernelSHAP", "Shapley", "ShapleyLabels", "Surrogate"]
