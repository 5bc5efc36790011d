"""Shapley values of patches, fitted by KernelSHAP or learned by ViT-Shapley and FastSHAP."""

from explainers.shapley.kernel_shap import KernelSHAP, ShapleyLabels
from explainers.shapley.networks import FastSHAPNetwork, LightShapleyNetwork, ViTShapleyNetwork
from explainers.shapley.shapley import Shapley
from explainers.shapley.surrogate import Surrogate

__all__ = [
    "FastSHAPNetwork",
    "KernelSHAP",
    "LightShapleyNetwork",
    "Shapley",
    "ShapleyLabels",
    "Surrogate",
    "ViTShapleyNetwork",
]
