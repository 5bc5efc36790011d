"""Shapley values of patches, fitted by KernelSHAP or learned by ViT-Shapley and FastSHAP."""

from typing import TYPE_CHECKING

from explainers import import_at_use
from explainers.shapley.kernel_shap import KernelSHAP, ShapleyLabels
from explainers.shapley.networks import FastSHAPNetwork, LightShapleyNetwork, ViTShapleyNetwork
from explainers.shapley.shapley import Shapley, ShapleyLoss

if TYPE_CHECKING:
    from explainers.shapley.surrogate import Surrogate

__getattr__ = import_at_use(__name__, "surrogate")  # it needs Lightning

__all__ = [
    "FastSHAPNetwork",
    "KernelSHAP",
    "LightShapleyNetwork",
    "Shapley",
    "ShapleyLabels",
    "ShapleyLoss",
    "Surrogate",
    "ViTShapleyNetwork",
]
