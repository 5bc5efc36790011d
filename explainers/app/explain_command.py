"""`explainers explain` and `explainers serve`."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from explainers.app.choosing import Purpose
from explainers.app.command import DEFAULT_MODEL
from explainers.app.comparing import Comparison, compared, mean_embedding
from explainers.app.neighbours import neighbours
from explainers.app.picture_files import Picture, check_writable, planned
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.saved.files import file_name, printable
from explainers.share import load
from explainers.target import TargetModel
from explainers.target.fetching import timm_model


def explain(options: Namespace) -> int:
    """Explain images, write a picture of each, and print a line for each.

    Returns:
        1 if an image could not be explained, else 0.
    """
    like = options.similar_to and f"like_{Path(options.similar_to).stem}"
    wanted = options.texts or options.classes or [like]
    named = bool(options.texts or like) or len(wanted) > 1
    pictures = planned(options.images, wanted, Path(options.output).expanduser(), named)
    session = session_of(options)
    centre = mean_embedding(session, options.against) if options.similar_to and options.against else None
    failures = 0
    written: list[Path] = []
    try:
        for _, group in groupby(pictures, lambda picture: picture.image):
            of_image = list(group)
            try:
                for line in explained(session, of_image, options, centre):
                    print(line, flush=True)
                    written.append(of_image[0].file)
            except InputError as error:
                failures += 1
                reason = str(error).removeprefix(f"{of_image[0].image}: ")
                print(f"explainers: {printable(of_image[0].name)}: {reason}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"explainers: stopped after {len(written)} of {len(pictures)} pictures", file=sys.stderr, flush=True)
        return 130
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
    if options.texts:
        (explanation,) = session.explain(pictures[0].image, text=options.texts, against=options.against)
    else:
        first = pictures[0].explained
        wanted = None if first is None else class_of(session, first)
        (explanation,) = session.explain(pictures[0].image, classes=wanted, top=options.top)
    for picture in pictures:
        if picture.explained is not None:
            explanation = explanation.of(picture.explained if options.texts else class_of(session, picture.explained))
        explanation.save(picture.file)
        listed = ", ".join(f"{each.name} {each.score:.2f}" for each in explanation.classes)
        kind = explanation.quantity if options.texts else f"top {len(explanation.classes)}"
        yield (
            f"{printable(picture.name)}: {explanation.title} by {explanation.method} ->"
            f" {printable(str(picture.file))} ({kind}: {listed})"
        )


def compared_line(comparison: Comparison, name: str, file: Path) -> str:
    """Write the picture of a comparison, and return a line about it."""
    comparison.save(file)
    likeness = f"{comparison.similarity:.2f} like {printable(comparison.other_name)}"
    return f"{printable(name)}: {likeness} by {comparison.method} -> {printable(str(file))}"


def nearest(options: Namespace) -> int:
    """Find the images of a folder that are most like an image; write a picture and print a line for each."""
    output = Path(options.output).expanduser()
    check_writable(output)
    session = session_of(options)
    stem = Path(options.image).stem
    for number, comparison in enumerate(neighbours(session, options.image, options.folder, options.k), 1):
        file = output / f"{file_name(f'{stem}_nearest_{number}')}.png"
        print(f"{number}. {compared_line(comparison, comparison.name, file)}", flush=True)
    return 0


def class_of(session: Session, wanted: str) -> int:
    """The index of a class that a user named, or gave the number of."""
    return session.class_index(int(wanted) if wanted.isdecimal() and wanted not in session.names else wanted)


def session_of(options: Namespace) -> Session:
    """The model and the explainer that the options name. What the model does not have is told at once."""
    texts = getattr(options, "texts", None)
    if not (texts or getattr(options, "similar_to", None)) and getattr(options, "against", None):
        raise InputError("expected --text or --similar-to beside --against, got --against alone: name one")
    model, weights, method = model_and_method(options)
    compares = getattr(options, "similar_to", None) or hasattr(options, "k")
    purpose: Purpose = "likeness" if compares else "texts" if texts else "classes"
    session = Session(model, method, weights, device_of(options), purpose=purpose)
    if texts:
        session.text_head.embed([*texts, *(options.against or ())])
    for wanted in getattr(options, "classes", None) or ():
        class_of(session, wanted)
    return session


def model_and_method(options: Namespace) -> tuple[Any, str | None, Any]:
    """The first three arguments of `Session` and of `serve`: the model, the file of its weights, and the method.

    The model of a trained explainer is the one that it was trained for, unless another is named.
    """
    folder = getattr(options, "explainer", None)
    if folder is not None and options.model is None:
        if options.weights or options.head:
            raise InputError("expected --model beside --weights or --head, got --explainer alone: name the model")
        explainer = load(folder)
        return explainer.target, None, explainer
    method = getattr(options, "method", "auto") if folder is None else Path(folder)
    model = DEFAULT_MODEL if options.model is None else options.model
    if options.head is None:
        return model, options.weights, method
    return TargetModel(timm_model(model, options.weights), head=options.head).eval(), None, method


def device_of(options: Namespace) -> str | None:
    """The device that the options name; otherwise a GPU, if there is one."""
    return options.device or ("cuda" if torch.cuda.is_available() else None)


def serve(options: Namespace) -> None:
    """Serve the page until Ctrl-C."""
    from explainers.app.page import serve as serve_page  # with Gradio, which takes seconds

    model, weights, method = model_and_method(options)
    serve_page(
        model,
        weights,
        method,
        host=options.host,
        port=options.port,
        device=device_of(options),
        open_browser=options.open,
        domain=options.domain,
    )


def serving(options: Namespace) -> str:
    """The command that serves the page for the same model and explainer."""
    chosen = {name: getattr(options, name) for name in ("model", "weights", "head", "explainer")}
    chosen["method"] = None if options.method == "auto" else options.method
    words = [word for name, value in chosen.items() if value for word in (f"--{name}", value)]
    return shlex.join(["explainers", "serve", *words])
