"""Explainers that need no training. Their names are known without torch; a class is imported at its first use."""

from typing import TYPE_CHECKING

from explainers import import_at_use

if TYPE_CHECKING:
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
        TokenTM,
        TransformerAttribution,
    )
    from explainers.posthoc.baselines import Chance
    from explainers.posthoc.cam import (
        ElementWiseCAM,
        GradCAM,
        GradCAMPlusPlus,
        HiResCAM,
        LayerCAM,
        XGradCAM,
        XGradCAMPlus,
    )
    from explainers.posthoc.clip_methods import NACLIP, GradECLIP, MaskCLIP
    from explainers.posthoc.contributions import ALTI, AttIN, GlobEnc
    from explainers.posthoc.gradients import CAT, AttCAT, AttIxG, FullGrad, InputXGradient, TokenGradient
    from explainers.posthoc.layerwise import PLUS, Rollout, SkipPLUS
    from explainers.posthoc.lime import LIME
    from explainers.posthoc.masks import RISE, Occlusion, ScoreCAM
    from explainers.posthoc.names import build, build_all, methods_for
    from explainers.posthoc.patch_vectors import CAM, DirectPaths, PathFlow, StagePaths
    from explainers.posthoc.pixel_gradients import DeepLift, GradientSHAP, IntegratedGradients, Saliency, SmoothGrad
    from explainers.posthoc.propagation import LRP, AttnLRP, ConservativeLRP, DecompX, LibraGrad, ResLRP, libra
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
    "StagePaths",
    "TokenGradient",
    "TokenTM",
    "TransformerAttribution",
    "ViTCX",
    "XGradCAM",
    "XGradCAMPlus",
    "build",
    "build_all",
    "libra",
    "method_names",
    "methods_for",
]

MODULES = (
    *("attention", "baselines", "cam", "clip_methods", "contributions", "gradients", "layerwise"),
    *("lime", "masks", "names", "patch_vectors", "pixel_gradients", "propagation", "vit_cx"),
)
"""Modules of this room, in which a name is looked for."""

AGGREGATIONS = "PLUS", "SkipPLUS", "Rollout"
"""Names of the classes that combine the layers of a method."""


def method_names() -> list[str]:
    """List the names of all methods: the classes of this room without the aggregations. It imports none of them."""
    return sorted(name for name in __all__ if name[0].isupper() and name not in AGGREGATIONS)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # type checkers see the imports above
    __getattr__ = import_at_use(__name__, *MODULES)
