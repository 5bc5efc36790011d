"""Metrics: a pure function for each formula, and a torchmetrics Metric that accumulates it in fixed-size sums."""

from typing import TYPE_CHECKING

from explainers import import_at_use

if TYPE_CHECKING:
    from explainers.metrics.agreement import RankCorrelation, TopOverlap, iou_at_k, rank_correlation, spearman
    from explainers.metrics.confidence import ARCC, ROAD, AverageDrop, AverageIncrease
    from explainers.metrics.curves import CURVES
    from explainers.metrics.localization import (
        AveragePrecision,
        BoxAccuracy,
        PointingGame,
        average_precision,
        box_hits,
        hits,
        segmentation,
    )
    from explainers.metrics.pairs import holm, paired_differences, sign_test
    from explainers.metrics.perturbation import PerturbationCurves, importance_order, perturbation_sweep
    from explainers.metrics.saco import SaCo, group_saliences, salience_groups
    from explainers.metrics.sanity import MaxSensitivity, Randomisation, max_sensitivity, random_weights
else:  # at first use, because torchmetrics takes a second
    EXPORTED = {
        "agreement": ("RankCorrelation", "TopOverlap", "iou_at_k", "rank_correlation", "spearman"),
        "confidence": ("ARCC", "ROAD", "AverageDrop", "AverageIncrease"),
        "curves": ("CURVES",),
        "localization": (
            *("AveragePrecision", "BoxAccuracy", "PointingGame"),
            *("average_precision", "box_hits", "hits", "segmentation"),
        ),
        "pairs": ("holm", "paired_differences", "sign_test"),
        "perturbation": ("PerturbationCurves", "importance_order", "perturbation_sweep"),
        "saco": ("SaCo", "group_saliences", "salience_groups"),
        "sanity": ("MaxSensitivity", "Randomisation", "max_sensitivity", "random_weights"),
    }
    __getattr__ = import_at_use(
        __name__, {name: f"{__name__}.{module}" for module, names in EXPORTED.items() for name in names}
    )

__all__ = [
    "ARCC",
    "CURVES",
    "ROAD",
    "AverageDrop",
    "AverageIncrease",
    "AveragePrecision",
    "BoxAccuracy",
    "MaxSensitivity",
    "PerturbationCurves",
    "PointingGame",
    "Randomisation",
    "RankCorrelation",
    "SaCo",
    "TopOverlap",
    "average_precision",
    "box_hits",
    "group_saliences",
    "hits",
    "holm",
    "importance_order",
    "iou_at_k",
    "max_sensitivity",
    "paired_differences",
    "perturbation_sweep",
    "random_weights",
    "rank_correlation",
    "salience_groups",
    "segmentation",
    "sign_test",
    "spearman",
]
