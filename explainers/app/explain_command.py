"""`explainers explain` and `explainers serve`."""

import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from explainers.app.command import DEFAULT_MODEL
from explainers.app.picture_files import Picture, planned
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.saved.files import printable
from explainers.share import load
from explainers.target import TargetModel
from explainers.target.fetching import timm_model


def explain(options: Namespace) -> int:
    """Explain images, write a picture of each, and print a line for each.

    Returns:
        1 if an image could not be explained, else 0.
    """
    pictures = planned(options.images, options.classes or [None], Path(options.output).expanduser())
    session = session_of(options)
    failures = 0
    written: list[Path] = []
    try:
        for picture in pictures:
            try:
                print(explained(session, picture, options.top), flush=True)
                written.append(picture.file)
            except InputError as error:
                failures += 1
                reason = str(error).removeprefix(f"{picture.image}: ")
                print(f"explainers: {printable(picture.name)}: {reason}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"explainers: stopped after {len(written)} of {len(pictures)} pictures", file=sys.stderr, flush=True)
        return 130
    if written:
        print(f"Next: click through all classes, and hide patches by hand: {serving(options)}")
    return 1 if failures else 0


def explained(session: Session, picture: Picture, top: int) -> str:
    """Write a picture, and return the line about it."""
    wanted = None if picture.explained is None else class_of(session, picture.explained)
    (explanation,) = session.explain(picture.image, classes=wanted, top=top)
    explanation.save(picture.file)
    shown = explanation.explained
    classes = ", ".join(f"{each.name} {each.score:.2f}" for each in explanation.classes)
    return (
        f"{printable(picture.name)}: {shown.name} {shown.score:.2f} by {explanation.method} ->"
        f" {printable(str(picture.file))} (top {len(explanation.classes)}: {classes})"
    )


def class_of(session: Session, wanted: str) -> int:
    """The index of a class that a user named, or gave the number of."""
    return session.class_index(int(wanted) if wanted.isdecimal() and wanted not in session.names else wanted)


def session_of(options: Namespace) -> Session:
    """The model and the explainer that the options name. A class that the model does not have is told at once."""
    model, weights, method = model_and_method(options)
    session = Session(model, method, weights, device_of(options))
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
    )


def serving(options: Namespace) -> str:
    """The command that serves the page for the same model and explainer."""
    chosen = {name: getattr(options, name) for name in ("model", "weights", "head", "explainer")}
    chosen["method"] = None if options.method == "auto" else options.method
    words = [word for name, value in chosen.items() if value for word in (f"--{name}", value)]
    return shlex.join(["explainers", "serve", *words])
