"""Numbers that make no sense are refused by constructors, before any image is seen, in a line that names them."""

import importlib
import inspect
import pkgutil
from functools import partial

import pytest
import torch
from refusals import check_refused

import benchmarks.papers
import explainers
from benchmarks.papers.approximation import Subsets
from explainers import posthoc
from explainers.evaluation import Evaluation
from explainers.masking import PatchGrid, apply_in_chunks, neighbourhoods
from explainers.posthoc.pixel_gradients import PixelExplainer
from explainers.refinement import Refined
from explainers.refinement.refinement import MaskedPairs
from explainers.shapley import KernelSHAP, ShapleyLabels, ShapleyLoss, ViTShapleyNetwork
from explainers.shapley.coalition_values import CoalitionValues
from explainers.text.encoders import text_embeddings
from explainers.transformer.rules import Rules
from explainers.tve import TVE, LightNetwork, Oracle, PaperNetwork
from explainers.tve.tve import TVELoss
from explainers.vectors import ExplainabilityVector, Selection, SelfExplaining, VectorSources
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.projections import prototypes_of

LIGHT = partial(LightNetwork, blocks=[0], width=12, depth=1)
SMALL = {"encoder": {"width": 16, "depth": 1, "heads": 2}, "decoder": {"width": 8, "depth": 1, "heads": 2}}


def transferred(target, grid, **settings):
    return ExplainabilityVector(target, grid, "", VectorSources(), None, [1.0], Selection(**settings))


BUILDERS = {
    Evaluation: lambda target, **settings: Evaluation(**settings),
    Subsets: lambda target, **settings: Subsets(**settings),
    TVE: partial(TVE, network=LIGHT),
    CoalitionValues: partial(CoalitionValues, count=3),
    MaskedPairs: partial(MaskedPairs, normalised=torch.zeros(1, 3, 32, 32), removal="zero"),
    LightNetwork: LIGHT,
    PaperNetwork: partial(PaperNetwork, **SMALL, head_layers=2),
}
REFUSED = [
    (posthoc.LIME, {"alpha": 0.0}),
    (posthoc.Occlusion, {"window": 2}),
    (posthoc.RISE, {"cells": "seven"}),
    (posthoc.RISE, {"probability": 1.5}),
    (posthoc.ViTCX, {"delta": -0.1}),
    (posthoc.SmoothGrad, {"noise": -1.0}),
    (posthoc.TAM, {"steps": 0}),
    (posthoc.ResLRP, {"gamma": -0.5}),
    (Oracle, {"hops": -1}),
    (TVE, {"pooling": 4}),
    (TVELoss, {"patches_per_image": 0}),
    (TVE, {"hops": [2, -1]}),
    (KernelSHAP, {"budget": 0}),
    (ShapleyLoss, {"coalitions": 0}),
    (Refined, {"passes": 4, "fit": "ranking"}),
    (LightNetwork, {"width": 0}),
    (PaperNetwork, {"head_layers": 1}),
    (PaperNetwork, {"encoder": {"width": 16, "depth": 1, "heads": 3}}),
    (ViTShapleyNetwork, {"ratio": 0}),
    (SelfExplaining, {"temperature": 0}),
    (transferred, {"tolerance": -0.1}),
    (transferred, {"k": 17}),
]


def takers_of_chunks():
    """Every class of the library whose constructor takes a chunk size."""
    papers = pkgutil.walk_packages(benchmarks.papers.__path__, "benchmarks.papers.")
    for found in (*pkgutil.walk_packages(explainers.__path__, "explainers."), *papers):
        for taker in vars(importlib.import_module(found.name)).values():
            own = inspect.isclass(taker) and taker.__module__ == found.name and inspect.isfunction(taker.__init__)
            if own and "chunk_size" in inspect.signature(taker).parameters and taker is not PixelExplainer:
                yield taker


CHUNKED = [(taker, {"chunk_size": 0}) for taker in takers_of_chunks()]


def name_of(value):
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("builder", "settings"), REFUSED + CHUNKED, ids=name_of)
def test_a_number_that_makes_no_sense_is_refused(request, builder, settings):
    build = BUILDERS.get(builder, builder)
    check_refused(request, next(iter(settings)), lambda target, grid: build(target, grid=grid, **settings))


def test_all_that_works_in_chunks_is_found():
    found = {taker for taker, _ in CHUNKED}
    assert {Evaluation, Subsets, TVELoss, Oracle, ShapleyLabels, KernelSHAP} < found
    assert {posthoc.RISE, posthoc.LIME, posthoc.Saliency, posthoc.ViTCX, posthoc.ScoreCAM} < found and len(found) >= 18


ONES = torch.ones(1, 1, 4).bool()
WITHOUT_TARGET = [
    ("patch_size", lambda: PatchGrid(32, 0)),
    ("hops", lambda: neighbourhoods(PatchGrid(32, 8), -1)),
    ("gamma", lambda: Rules(gamma=-1.0)),
    ("scale", lambda: FixedHead(torch.eye(2), scale=-1.0)),
    ("limit", lambda: prototypes_of(None, None, limit=0)),
    ("templates", lambda: text_embeddings(lambda texts: torch.ones(len(texts), 2), ["cat"], templates=[])),
    ("templates", lambda: text_embeddings(lambda texts: torch.ones(len(texts), 2), ["cat"], templates=["a photo"])),
    ("chunk_size", lambda: apply_in_chunks(lambda images, masks: masks, torch.zeros(1, 3, 2, 2), ONES, 0)),
]


@pytest.mark.parametrize(("told", "call"), WITHOUT_TARGET)
def test_numbers_without_a_target_are_checked_too(told, call, request):
    check_refused(request, told, call)
