"""Passes, explainers and models with which nothing can be refined are refused in one line, which names them."""

import pytest
import torch
from refusals import check_refused
from torch import nn

from explainers.models import TargetModel
from explainers.posthoc import build
from explainers.refinement import Refined, explain_again, refine

CLASSES = torch.tensor([3, 0, 4, 1, 1])


@pytest.fixture
def again(anyhead, images):
    return lambda **settings: explain_again(anyhead, images, **{"classes": CLASSES, **settings})


@pytest.fixture
def refined(anyhead, target, images):
    """Refines in 13 passes, which rank patches, or with other settings."""

    def build(explainer=anyhead, passes=13, fit="again", target=target, **settings):
        return refine(explainer, images, CLASSES, passes, fit=fit, target=target, **settings)

    return build


@pytest.fixture
def settled(target, grid):
    return lambda prior="GAE", **settings: Refined(target, grid, prior, **settings)


def give(heatmaps):
    return lambda images, classes: heatmaps


def another_head(make_model):
    return TargetModel(make_model(), head=nn.Linear(24, 2))


REFUSED = [
    # explaining again
    ("low", lambda again: again(low=0)),
    ("high", lambda again: again(high=17)),
    ("share", lambda again: again(share=2.0)),
    ("removal", lambda again: again(removal="drop")),
    ("functionals", lambda again: again(functionals=torch.zeros(5, 24))),
    ("Chance", lambda refined, target, grid: refined(build("Chance", target, grid)).explain(torch.zeros(5, 24))),
    ("[5, 8, 8]", lambda images, target: explain_again(give(torch.zeros(5, 8, 8)), images, CLASSES, target=target)),
    ("40", lambda anyhead: explain_again(anyhead, torch.zeros(1, 3, 40, 40, dtype=torch.uint8), CLASSES[:1])),
    ("passes", lambda refined: refined(passes=32)),
    ("fit=again", lambda refined: refined(explainer=None)),
    ("removal", lambda refined: refined(removal="drop")),
    ("errors", lambda refined: refined().errors),  # ranks have none
    ("vectors", lambda refined: refined().vectors),
    # a regression
    ("passes", lambda settled: settled(passes=6, fit="ranking")),
    ("passes", lambda refined: refined(passes=8, fit="ranking").more(3)),
    ("tolerance", lambda refined: refined(passes=8, fit="ranking").until(-1.0, 16)),
    ("vectors", lambda refined, target, grid: refined(build("GAE", target, grid), 8, "ranking").vectors),
    # explainers that are none, of another model or of another head, and what they return
    ("TargetModel", lambda settled, target: settled(target)),
    ("GAE", lambda refined: refined("GAE")),
    ("this model", lambda refined, make_model: refined(target=TargetModel(make_model(seed=1)))),
    (
        "this head",
        lambda refined, target, grid, make_model: refined(build("GAE", target, grid), target=another_head(make_model)),
    ),
    ("[5, 32, 32]", lambda refined: refined(give(torch.zeros(5, 32, 32)), 8, "ranking")),
    ("NaN", lambda refined: refined(give(torch.full((5, 4, 4), torch.nan)), 8, "ranking")),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_does_not_fit_is_refused(told, call, request):
    check_refused(request, told, call)
