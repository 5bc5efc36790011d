"""`explainers explain` and `explainers serve`."""

import copy
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from explainers.app.choosing import Purpose, choose, passes_of
from explainers.app.command import DEFAULT_MODEL, in_one_line
from explainers.app.comparing import Comparison, compared, mean_embedding
from explainers.app.neighbours import neighbours
from explainers.app.passes import announce_passes, set_passes
from explainers.app.picture_files import Picture, check_writable, found_images, planned
from explainers.app.saving import picture_name
from explainers.app.session import Session
from explainers.errors import InputError, checks_choices
from explainers.models import TargetModel
from explainers.models.fetching import timm_model
from explainers.models.names import class_index
from explainers.posthoc.names import labelled
from explainers.runtime.progress import progress_of_passes
from explainers.saved.files import printable
from explainers.share import load


def explain(options: Namespace) -> int:
    """Explain images, write a picture of each, and print a line for each.

    Returns:
        1 if an image could not be explained, else 0.
    """
    wanted = options.texts or options.classes or [options.similar_to and f"like {Path(options.similar_to).stem}"]
    found = found_images(options.images, len(wanted) * len(labelled(options.method)), options.output)
    sessions = {session.method: session for session in sessions_of(options)}
    pictures = planned(found, list(sessions), wanted, options.output)
    announce_passes(list(sessions.values()), len(found) * len(wanted))
    first = next(iter(sessions.values()))
    centre = mean_embedding(first, options.against) if options.similar_to and options.against else None
    failures = 0
    written = 0
    try:
        for _, group in groupby(pictures, lambda picture: picture.image):
            of_image = list(group)
            try:
                for method, of_method in groupby(of_image, lambda picture: picture.method):
                    for line in explained(sessions[method], list(of_method), options, centre):
                        written += 1
                        print(line, flush=True)
            except InputError as error:
                failures += 1
                reason = str(error).removeprefix(f"{of_image[0].image}: ")
                print(f"explainers: {in_one_line(f'{of_image[0].name}: {reason}')}", file=sys.stderr, flush=True)
    except KeyboardInterrupt as stopped:
        stopped.add_note(f"after {written} of {len(pictures)} pictures")
        raise
    if written:
        print(f"Next: click through all classes, and hide patches by hand: {serving(options)}")
    return 1 if failures else 0


def explained(
    session: Session, pictures: Sequence[Picture], options: Namespace, centre: Tensor | None = None
) -> Iterator[str]:
    """Write the pictures of one image, and yield a line about each."""
    if options.similar_to:
        (comparison,) = compared(session, pictures[0].image, options.similar_to, centre)
        yield compared_line(comparison, pictures[0].name, pictures[0].file)
        return
    image = pictures[0].image
    with shown_progress(session, pictures[0].name):
        if options.texts:
            (explanation,) = session.explain(image, text=options.texts, against=options.against)
        else:
            first = pictures[0].explained
            wanted = None if first is None else class_of(session, first)
            (explanation,) = session.explain(image, classes=wanted, top=options.top)
    for picture in pictures:
        if picture.explained is not None:
            with shown_progress(session, picture.name):
                chosen = picture.explained if options.texts else class_of(session, picture.explained)
                explanation = explanation.of(chosen)
        explanation.save(picture.file)
        listed = ", ".join(f"{each.name} {each.score:.2f}" for each in explanation.classes)
        kind = explanation.quantity if options.texts else f"top {len(explanation.classes)}"
        yield printable(
            f"{picture.name}: {explanation.title} by {explanation.method} -> {picture.file} ({kind}: {listed})"
        )


def shown_progress(session: Session, name: str) -> AbstractContextManager[None]:
    """Show how far the heatmap of an image is."""
    return progress_of_passes(f"{printable(name)} by {session.method}", passes_of(session.explainer))


def compared_line(comparison: Comparison, name: str, file: Path) -> str:
    """Write the picture of a comparison, and return a line about it."""
    comparison.save(file)
    likeness = f"{comparison.similarity:.2f} like {comparison.other_name}"
    return printable(f"{name}: {likeness} by {comparison.method} -> {file}")


def nearest(options: Namespace) -> int:
    """Find the images of a folder that are most like an image; write a picture and print a line for each."""
    check_writable(options.output)
    session = session_of(options)
    for number, comparison in enumerate(neighbours(session, options.image, options.folder, options.k), 1):
        file = options.output / picture_name(options.image, comparison.method, f"nearest {number}")
        print(f"{number}. {compared_line(comparison, comparison.name, file)}", flush=True)
    return 0


def class_of(session: Session, wanted: str) -> int:
    """The index of a class that a user named, or gave the number of."""
    number = wanted.isdecimal() and wanted not in session.names
    return class_index(int(wanted) if number else wanted, session.names, "--class")


def session_of(options: Namespace) -> Session:
    """The model and the one explainer that the options name."""
    sessions = sessions_of(options)
    if len(sessions) > 1:
        listed = ", ".join(session.method for session in sessions)
        raise InputError(f"expected one method in --method, got {listed}: leave out all but one")
    return sessions[0]


def sessions_of(options: Namespace) -> list[Session]:
    """The model with each of the explainers that the options name. What the model does not have is told at once."""
    texts = getattr(options, "texts", None)
    if not (texts or getattr(options, "similar_to", None)) and getattr(options, "against", None):
        raise InputError("expected --text or --similar-to beside --against, got --against alone: name one")
    model, weights, methods = model_and_methods(options)
    compares = getattr(options, "similar_to", None) or hasattr(options, "k")
    purpose: Purpose = "likeness" if compares else "texts" if texts else "classes"
    batch_size = getattr(options, "batch_size", None)
    first = Session(model, methods[0], weights, device_of(options), purpose=purpose, batch_size=batch_size)
    if texts:
        first.text_head.embed([*texts, *(options.against or ())])
    for wanted in getattr(options, "classes", None) or ():
        class_of(first, wanted)
    sessions = [first, *(with_method(first, method, purpose) for method in methods[1:])]
    if getattr(options, "passes", None):
        set_passes(sessions, options.passes)
    return sessions


@checks_choices
def with_method(session: Session, method: Any, purpose: Purpose) -> Session:
    """A session with the same model and another explainer."""
    other = copy.copy(session)
    other.explainer, other.method = choose(session.target, method, purpose)
    return other


def model_and_methods(options: Namespace) -> tuple[Any, str | None, list[Any]]:
    """The model, the file of its weights, and the methods, as `Session` takes them.

    The model of a trained explainer is the one that it was trained for, unless another is named.
    """
    folder = getattr(options, "explainer", None)
    if folder is not None and options.model is None:
        if options.weights or options.head:
            raise InputError("expected --model beside --weights or --head, got --explainer alone: name the model")
        explainer = load(folder)
        return explainer.target, None, [explainer]
    given = labelled(getattr(options, "method", ["auto"])).values()
    methods = [{name: chosen} if chosen else name for name, chosen in given] if folder is None else [Path(folder)]
    model = DEFAULT_MODEL if options.model is None else options.model
    if options.head is None:
        return model, options.weights, methods
    return TargetModel(timm_model(model, options.weights), head=options.head).eval(), None, methods


def device_of(options: Namespace) -> str | None:
    """The device that the options name; otherwise a GPU, if there is one."""
    return options.device or ("cuda" if torch.cuda.is_available() else None)


def serve(options: Namespace) -> None:
    """Serve the page until Ctrl-C."""
    from explainers.app.page import serve as serve_page  # with Gradio, which takes seconds

    model, weights, methods = model_and_methods(options)
    if len(methods) > 1:
        raise InputError("expected one method in --method, got several: the page compares it with others")
    serve_page(
        model,
        weights,
        methods[0],
        host=options.host,
        port=options.port,
        device=device_of(options),
        open_browser=options.open,
        domain=options.domain,
    )


def serving(options: Namespace) -> str:
    """The command that serves the page for the same model and explainer."""
    chosen = {name: getattr(options, name) for name in ("model", "weights", "head", "explainer")}
    method = next(iter(labelled(options.method)))
    chosen["method"] = None if method == "auto" else method
    words = [word for name, value in chosen.items() if value for word in (f"--{name}", value)]
    return shlex.join(["explainers", "serve", *words])
