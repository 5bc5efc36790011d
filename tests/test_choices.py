"""A misspelt choice is refused wherever one is taken, with the name of the argument and everything to choose from."""

import importlib
import inspect
import pkgutil
import types
from typing import Literal, Union, get_args, get_origin

import pytest
from refusals import check_refused

import benchmarks.papers
import datamodules
import explainers
from benchmarks.papers.approximation import Subsets
from benchmarks.papers.general import General
from datamodules.datasets import unlabelled_images
from explainers import posthoc
from explainers.app import choosing
from explainers.app.page.views import curves
from explainers.app.session import Session
from explainers.auditing.hiding import hide
from explainers.auditing.repair import hide_members
from explainers.errors import REPEATED, InputError, check_choices, checks_choices
from explainers.evaluation.measurement import check_target
from explainers.evaluation.sweep import Sweep
from explainers.images.transform import ImageTransform
from explainers.metrics.perturbation import perturbation_sweep
from explainers.models import as_target
from explainers.models.functionals import choose_temperature
from explainers.models.mapping import Inputs
from explainers.models.scores import log_odds, log_probabilities, scale_logits
from explainers.posthoc import attention, white_box
from explainers.posthoc.names import label_methods
from explainers.report.results import read_results
from explainers.running.rows import list_explainers
from explainers.runtime.sampling import stream
from explainers.transformer import blocks
from explainers.tve.tve import TVELoss
from explainers.vectors import ExplainabilityVector, Selection, VectorSources, exported_target
from explainers.vectors.lambda_sweep import loss_of

# Inner functions: their callers have checked the choice, and pass it on for every batch, layer or chunk
EXCLUDED = {
    choosing._choose_default: "choose checks its purpose",
    choosing._check_fits: "choose checks its purpose",
    Session: "choose checks its purpose",
    blocks.attention_features: "ViTCX checks its features",
    blocks.attention_module: "ViTCX checks its features",
    curves: "OpenedImage.curve checks its side",
    stream: "its purposes are written in the code, not in a config",
    attention.transformation_weights: "TokenTM checks its scale",
    white_box.class_functionals: "WhiteBox checks its output",
    **dict.fromkeys((as_target, Inputs), "TargetModel checks"),
    **dict.fromkeys(
        (scale_logits, log_probabilities, log_odds, choose_temperature, perturbation_sweep),
        "TargetModel checks its score",
    ),
    exported_target: "TargetModel checks its score",
    loss_of: "Selection checks its metric",
    **dict.fromkeys((check_target, Sweep), "Evaluation checks its curves and removals"),
    **dict.fromkeys((hide, hide_members), "repair checks its removal"),
    ImageTransform: "configs and processors name its resize, which their readers check",
    General: "its class_map is `same` or a list of numbers",
}


def modules():
    for package in (explainers, datamodules, benchmarks.papers):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(found.name)


def choices_in(hint):
    """The choices of a type hint: of a `Literal`, or of one anywhere inside, such as in a sequence."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for part in get_args(hint) for choice in choices_in(part))


def takers():
    """(class or function, argument, choices) of everything in these packages that takes a choice."""
    for module in modules():
        for found in list(vars(module).values()):
            if not (inspect.isclass(found) or inspect.isfunction(found)) or found.__module__ != module.__name__:
                continue
            call = found.__init__ if inspect.isclass(found) else found
            if not inspect.isfunction(call) or call.__module__.split(".")[0] not in (
                "explainers",
                "datamodules",
                "benchmarks",
            ):
                continue  # a constructor of torchmetrics, Lightning or Python itself
            for name, parameter in inspect.signature(call).parameters.items():
                if choices_in(parameter.annotation):
                    yield found, name, choices_in(parameter.annotation)


TAKERS = list(takers())
CHECKED = [taker for taker in TAKERS if taker[0] not in EXCLUDED]


@pytest.mark.parametrize(
    ("taker", "name", "choices"), CHECKED, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_misspelt_choice_is_named_with_all_that_there_are(taker, name, choices):
    """Nothing else is given: a choice is checked before everything else."""
    optional = type(None) in get_args(hint_of(taker, name))
    for misspelt in (f"{choices[0]}x", "") if optional else (f"{choices[0]}x", None, ""):
        with pytest.raises(InputError, match=f"expected {name} ") as caught:
            taker(**{name: misspelt})
        message = str(caught.value)
        assert all(choice in message for choice in choices) and message.endswith(f"got {misspelt}")


def hint_of(taker, name):
    call = taker.__init__ if inspect.isclass(taker) else taker
    return inspect.signature(call).parameters[name].annotation


LISTS = [taker for taker in CHECKED if get_origin(hint_of(*taker[:2])) not in (Literal, None, Union, types.UnionType)]


@pytest.mark.parametrize(("taker", "name", "choices"), LISTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_choice_that_is_listed_twice_is_refused_unless_each_is_a_draw_of_its_own(taker, name, choices):
    twice = [choices[0], choices[-1], choices[0]]
    if REPEATED in get_args(hint_of(taker, name)):
        check_choices({name: twice}, {name: hint_of(taker, name)})
        return
    with pytest.raises(InputError, match=name):
        taker(**{name: twice})


def vector(target, grid, **settings):
    return ExplainabilityVector(target, grid, "", VectorSources(), None, **settings, selection=Selection())


ONE_NAME = {"explainers": {"GAE": {}}, "methods": ["GAE"], "tasks": {"a": {}}}
ROOTS = ["tests", "tests/../tests"]
REFUSED = [
    ("hops", lambda target, grid: TVELoss(target, grid, [1, 1])),
    ("subsets", lambda grid: Subsets(grid, subsets=[2, 3, 2])),
    ("lambda_2", lambda target, grid: vector(target, grid, lambda_2=[0.5, 0.5])),
    ("methods", lambda: label_methods(["GAE", "RISE", {"GAE": {}}])),
    ("explainers and methods", lambda: list_explainers("a", ONE_NAME)),
    ("results.files", lambda: read_results(["a.json", "b.json", "./a.json"])),
    ("roots", lambda target: unlabelled_images(ROOTS, target.transform)),
    ("output", lambda target, grid: posthoc.build_all([{"GAE": {"output": "logits"}}], target, grid)),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_whatever_is_listed_is_listed_once_and_options_of_methods_are_choices(told, call, request):
    check_refused(request, told, call)


@checks_choices
def drawn(count: int, colours: list[Literal["red", "green"]], shape: Literal["circle", "square"] = "circle") -> str:
    return f"{count} {'-'.join(colours)} {shape}"


@pytest.mark.parametrize("colours", [["red", "blue"], "red", None])
def test_a_list_of_choices_is_a_list_and_all_of_it_is_checked(colours):
    with pytest.raises(InputError) as caught:
        drawn(1, colours)
    assert caught.value.setting == "colours"
