"""Explanations refined by masked forward passes: any explainer as prior, every head from the same passes."""

from explainers.refinement.again import explain_again
from explainers.refinement.refine import Refined, refine
from explainers.refinement.refinement import Estimate, Refinement

__all__ = ["Estimate", "Refined", "Refinement", "explain_again", "refine"]
