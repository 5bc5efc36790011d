"""Numbers that make no sense are refused by constructors, before any image is seen, in a line that names them."""

import importlib
import inspect
import pkgutil
import re
from functools import partial

import pytest
import torch

import benchmarks.papers
import explainers
from benchmarks.papers.approximation import Subsets
from explainers import posthoc
from explainers.errors import InputError, check_range
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
SMALL = {"width": 16, "depth": 1, "heads": 2, "decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2}
BUILDERS = {
    Evaluation: lambda target, **settings: Evaluation(**settings),
    Subsets: lambda target, **settings: Subsets(**settings),
    TVE: partial(TVE, network=LIGHT),
    CoalitionValues: partial(CoalitionValues, count=3),
    MaskedPairs: partial(MaskedPairs, normalised=torch.zeros(1, 3, 32, 32), removal="zero"),
    LightNetwork: LIGHT,
    PaperNetwork: partial(PaperNetwork, **SMALL, head_layers=2),
}
HOPS = "expected hops, one or more radii of at least 0 patches, such as [2], got "
REFUSED = [
    (posthoc.LIME, {"alpha": 0.0}, "expected alpha above 0, got alpha=0.0"),
    (posthoc.Occlusion, {"window": 2}, "expected an odd window, which has a patch in its middle, got window=2"),
    (posthoc.RISE, {"cells": -1}, "expected cells above 0, got cells=-1"),
    (posthoc.RISE, {"cells": "seven"}, "expected cells above 0, got cells=seven"),
    (posthoc.RISE, {"probability": 1.5}, "expected probability from 0 to 1, got probability=1.5"),
    (posthoc.ViTCX, {"delta": -0.1}, "expected delta of at least 0, got delta=-0.1"),
    (posthoc.SmoothGrad, {"noise": -1.0}, "expected noise of at least 0, got noise=-1.0"),
    (posthoc.TAM, {"steps": 0}, "expected steps above 0, got steps=0"),
    (posthoc.ResLRP, {"gamma": -0.5}, "expected gamma of at least 0, got gamma=-0.5"),
    (Oracle, {"hops": -1}, "expected hops of at least 0, got hops=-1"),
    (TVE, {"pooling": 4}, "expected an odd pooling, a window with a patch in its middle, got pooling=4"),
    (TVELoss, {"patches_per_image": 0}, "expected patches_per_image from 1 to 16, got patches_per_image=0"),
    (TVELoss, {"patches_per_image": "four"}, "expected patches_per_image from 1 to 16, got patches_per_image=four"),
    (TVELoss, {"hops": ()}, f"{HOPS}[]"),
    (TVE, {"hops": [2, -1]}, f"{HOPS}[2, -1]"),
    (KernelSHAP, {"budget": 0}, "expected budget above 0, got budget=0"),
    (ShapleyLoss, {"coalitions": 0}, "expected coalitions above 0, got coalitions=0"),
    (
        Refined,
        {"passes": 4, "fit": "ranking"},
        "expected at least 8 passes, because fewer cannot tell the size of the prior, got passes=4",
    ),
    (Refined, {"seed": 1.5}, "expected seed as an integer, got seed=1.5"),
    (LightNetwork, {"blocks": []}, "expected blocks of vit_tiny_patch16_224 to read, got none"),
    (LightNetwork, {"width": 0}, "expected width above 0, got width=0"),
    (PaperNetwork, {"head_layers": 1}, "expected head_layers of at least 2, got head_layers=1"),
    (PaperNetwork, {"heads": 3}, "expected a width that is a multiple of 4 and of 3 heads, got width=16"),
    (PaperNetwork, {"decoder_width": 0}, "expected a decoder_width that is a multiple of 4 and of 2 heads, got"),
    (ViTShapleyNetwork, {"ratio": 0}, "expected ratio above 0, got ratio=0"),
    (SelfExplaining, {"temperature": 0}, "expected temperature above 0"),
]


def takers_of_chunks():
    """Every class of the library whose constructor takes a chunk size."""
    papers = pkgutil.walk_packages(benchmarks.papers.__path__, "benchmarks.papers.")
    for found in (*pkgutil.walk_packages(explainers.__path__, "explainers."), *papers):
        for taker in vars(importlib.import_module(found.name)).values():
            own = inspect.isclass(taker) and taker.__module__ == found.name and inspect.isfunction(taker.__init__)
            if own and "chunk_size" in inspect.signature(taker).parameters and taker is not PixelExplainer:
                yield taker


CHUNKED = [(taker, {"chunk_size": 0}, "expected chunk_size above 0, got chunk_size=0") for taker in takers_of_chunks()]


def name_of(value):
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("builder", "settings", "message"), REFUSED + CHUNKED, ids=name_of)
def test_a_number_that_makes_no_sense_is_refused(target, grid, builder, settings, message):
    build = BUILDERS.get(builder, builder)
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        build(target, grid=grid, **settings)


def test_all_that_works_in_chunks_is_found():
    found = {taker for taker, _, _ in CHUNKED}
    assert {Evaluation, Subsets, TVELoss, Oracle, ShapleyLabels, KernelSHAP} < found
    assert {posthoc.RISE, posthoc.LIME, posthoc.Saliency, posthoc.ViTCX, posthoc.ScoreCAM} < found and len(found) >= 18


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PatchGrid(32, 0), "expected patch_size above 0, got patch_size=0"),
        (lambda: neighbourhoods(PatchGrid(32, 8), -1), "expected hops of at least 0, got hops=-1"),
        (lambda: Rules(gamma=-1.0), "expected gamma of at least 0, got gamma=-1.0"),
        (lambda: FixedHead(torch.eye(2), scale=-1.0), "expected scale above 0, got scale=-1.0"),
        (lambda: prototypes_of(None, None, limit=0), "expected limit above 0, got limit=0"),
        (
            lambda: text_embeddings(lambda texts: torch.ones(len(texts), 2), ["cat"], templates=[]),
            "expected templates with {} for the name, as 'a photo of a {}.', got none",
        ),
        (
            lambda: apply_in_chunks(
                lambda images, masks: masks, torch.zeros(1, 3, 2, 2), torch.ones(1, 1, 4).bool(), 0
            ),
            "expected chunk_size above 0, got chunk_size=0",
        ),
        (lambda: check_range(0, 1, share=float("nan")), "expected share from 0 to 1, got share=nan"),
    ],
)
def test_numbers_without_a_target_are_checked_too(build, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        build()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tolerance": -0.1}, "expected tolerance of at least 0, got tolerance=-0.1"),
        ({"k": 17}, "expected k from 1 to 16, got k=17"),
    ],
)
def test_the_numbers_of_a_transfer_are_checked(target, grid, tmp_path, settings, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        ExplainabilityVector(target, grid, "", VectorSources(), None, [1.0], Selection(**settings))
