"""The model and the explainers that the options of a command name, and how many forward passes they take."""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from explainers.app.argument_types import parse_methods
from explainers.app.choosing import Method, choose, estimate_passes
from explainers.app.command import DEFAULT_MODEL
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.models import TargetModel, as_target
from explainers.models.names import class_index, find_other_classes
from explainers.posthoc import method_names
from explainers.posthoc.defaults import Purpose
from explainers.posthoc.names import find_passes_option, label_methods
from explainers.refinement import Refined
from explainers.share import load

MANY = 200
"""Forward passes of one heatmap above which they are announced."""

TRIED = 16
"""Number of images whose forward pass is timed."""


def start_sessions(options: Namespace) -> list[Session]:
    """The model with each of the explainers that the options name. What the model does not have is told at once."""
    model, methods = model_and_methods(options)
    purpose: Purpose = "likeness" if options.similar_to or options.k else "texts" if options.texts else "classes"
    first = Session(model, methods[0], None, purpose, options.batch_size)
    if options.texts:
        first.text_head.embed([*options.texts, *(options.against or ())])
    elif not options.similar_to:
        find_classes(first, options)
    sessions = [first, *(first.with_method(method, purpose) for method in methods[1:])]
    if options.passes:
        set_passes(sessions, options.passes)
    return sessions


def model_and_methods(options: Namespace) -> tuple[TargetModel, list[Method]]:
    """The model and the methods, as `Session` takes them.

    The model of a trained explainer is the one that it was trained for, unless another is named.
    """
    if options.explainer and options.model is None:
        if options.weights or options.head or options.score or options.image_size:
            raise InputError(
                "--weights, --head, --score and --image-size need --model beside --explainer: name the model"
            )
        explainer = load(options.explainer)
        return _build_model(explainer.target, options), [explainer]
    named = label_methods(options.method)
    methods: list[Method] = [{name: chosen} if chosen else name for name, chosen in named.values()]
    methods = [Path(options.explainer)] if options.explainer else methods
    purpose = "--similar-to" if options.similar_to else options.run
    if len(methods) > 1 and purpose not in ("explain", "benchmark"):
        raise InputError(f"--method {', '.join(named)}: expected one method for {purpose}: leave out all but one")
    return _build_model(options.model or DEFAULT_MODEL, options), methods


def _build_model(model: str | TargetModel, options: Namespace) -> TargetModel:
    """The model with all that the options say about it, on a GPU if there is one, unless they name another device."""
    return as_target(
        model,
        options.weights,
        head=options.head,
        classes=options.class_names or (),
        score=options.score,
        device=options.device or ("cuda" if torch.cuda.is_available() else None),
        image_size=options.image_size,
        white=options.white,
        bands=options.bands,
    )


def find_classes(session: Session, options: Namespace) -> tuple[list[int], list[int]]:
    """The indices of the classes of --class and of --against, which a user named, or gave the numbers of."""
    chosen = [class_index(wanted, session.names) for wanted in options.classes or ()]
    others = [class_index(other, session.names, "against") for other in options.against or ()]
    return chosen, find_other_classes(others, chosen, session.names)


def set_passes(sessions: Sequence[Session], passes: int) -> None:
    """Give explainers another number of forward passes: methods that choose one; others are refined by it.

    Raises:
        InputError: if an explainer does not allow this number.
    """
    for session in sessions:
        ((name, options),) = label_methods(parse_methods(session.method)).values()
        option = _passes_option(name)
        if option is not None:
            session.explainer, session.method = choose(session.target, {name: {**options, option: passes}})
        else:
            grid = getattr(session.explainer, "grid", session.target.grid)
            session.explainer = Refined(session.target, grid, session.explainer, passes)
            session.method = f"Refined(prior={session.method}, passes={passes})"


def _passes_option(name: str) -> str | None:
    """The option of a method that sets its passes; `None` if it has none, or is no method, but a trained explainer."""
    return find_passes_option(name) if name.partition("-")[0].removeprefix("Libra") in method_names() else None


def announce_passes(sessions: Sequence[Session], pictures: int, against: Sequence[Any] = ()) -> None:
    """Print how many passes a heatmap takes, and how long `pictures` take, for each explainer with `MANY` passes."""
    slow = [session for session in sessions if estimate_passes(session.explainer, against) > MANY]
    seconds = _seconds_per_pass(slow[0]) if slow else 0
    several = f"{pictures} picture{'s' * (pictures > 1)}"
    for session in slow:
        passes = estimate_passes(session.explainer, against)
        duration = passes * pictures * seconds
        about = f"{duration / 60:.0f} min" if duration > 90 else f"{duration:.0f} s"
        advice = "; --passes N sets their number" if _passes_option(session.method.partition("(")[0]) else ""
        line = f"{session.method}: {passes} forward passes for each picture, about {about} for {several}{advice}"
        print(line, file=sys.stderr, flush=True)


@torch.no_grad()
def _seconds_per_pass(session: Session) -> float:
    """The time of a forward pass in a batch, after a first one that is not timed."""
    target = session.target
    grey = torch.full((TRIED, target.channels, *target.grid.size), 128, dtype=torch.uint8, device=target.mean.device)
    target(grey)
    start = time.perf_counter()
    target(grey).sum().item()  # which waits for the device
    return (time.perf_counter() - start) / TRIED
