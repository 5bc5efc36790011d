"""Explainers that need no training."""

from explainers.posthoc.attention import (
    GAE,
    TAM,
    AttentionGradCAM,
    AttentionGradient,
    AttentionRollout,
    GenAtt,
    GradSAM,
    LeGrad,
    PartialLRP,
    RawAttention,
    TransformerAttribution,
)
from explainers.posthoc.cam import ElementWiseCAM, GradCAM, GradCAMPlusPlus, HiResCAM, LayerCAM, XGradCAM, XGradCAMPlus
from explainers.posthoc.chance import Chance
from explainers.posthoc.class_activation import CAM
from explainers.posthoc.contributions import ALTI, AttIN, GlobEnc
from explainers.posthoc.dense_similarity import NACLIP, MaskCLIP
from explainers.posthoc.grad_eclip import GradECLIP
from explainers.posthoc.gradients import CAT, AttCAT, AttIxG, FullGrad, InputXGradient, TokenGradient
from explainers.posthoc.greedy import GreedyOrder
from explainers.posthoc.layerwise import PLUS, Rollout, SkipPLUS
from explainers.posthoc.lime import LIME
from explainers.posthoc.masks import RISE, Occlusion, ScoreCAM
from explainers.posthoc.names import build, build_all, methods_for
from explainers.posthoc.patch_vectors import DirectPaths, PathFlow
from explainers.posthoc.pixel_gradients import DeepLift, GradientSHAP, IntegratedGradients, Saliency, SmoothGrad
from explainers.posthoc.propagation import LRP, AttnLRP, ConservativeLRP, DecompX, LibraGrad, ResLRP, libra
from explainers.posthoc.token_tm import TokenTM
from explainers.posthoc.vit_cx import ViTCX

__all__ = [
    "ALTI",
    "CAM",
    "CAT",
    "GAE",
    "LIME",
    "LRP",
    "NACLIP",
    "PLUS",
    "RISE",
    "TAM",
    "AttCAT",
    "AttIN",
    "AttIxG",
    "AttentionGradCAM",
    "AttentionGradient",
    "AttentionRollout",
    "AttnLRP",
    "Chance",
    "ConservativeLRP",
    "DecompX",
    "DeepLift",
    "DirectPaths",
    "ElementWiseCAM",
    "FullGrad",
    "GenAtt",
    "GlobEnc",
    "GradCAM",
    "GradCAMPlusPlus",
    "GradECLIP",
    "GradSAM",
    "GradientSHAP",
    "GreedyOrder",
    "HiResCAM",
    "InputXGradient",
    "IntegratedGradients",
    "LayerCAM",
    "LeGrad",
    "LibraGrad",
    "MaskCLIP",
    "Occlusion",
    "PartialLRP",
    "PathFlow",
    "RawAttention",
    "ResLRP",
    "Rollout",
    "Saliency",
    "ScoreCAM",
    "SkipPLUS",
    "SmoothGrad",
    "TokenGradient",
    "TokenTM",
    "TransformerAttribution",
    "ViTCX",
    "XGradCAM",
    "XGradCAMPlus",
    "build",
    "build_all",
    "libra",
    "methods_for",
]
