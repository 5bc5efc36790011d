"""`explainers explain`, `explainers nearest` and `explainers serve`."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import nn

from explainers.app.choosing import CHEAP, Method, passes_of
from explainers.app.command import DEFAULT_MODEL, in_one_line
from explainers.app.comparing import Comparison, Embedded, compare_with, mean_embedding, read_image, stream_nearest
from explainers.app.explanation import Explanation, picture_name
from explainers.app.passes import announce_passes, set_passes
from explainers.app.photos import read_photos
from explainers.app.picture_files import Picture, check_writable, found_images, planned
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.fetching import timm_model
from explainers.models.names import class_index
from explainers.posthoc.defaults import Purpose
from explainers.posthoc.names import labelled
from explainers.runtime.progress import progress_of_passes
from explainers.saved.files import printable
from explainers.share import load

Drawn = Explanation | Comparison


def explain(options: Namespace) -> int:
    """Explain images, write a picture of each, and print a line for each.

    Returns:
        1 if an image could not be explained, else 0.
    """
    wanted = options.texts or options.classes or [options.similar_to and f"like {Path(options.similar_to).stem}"]
    found = found_images(options.images, len(wanted) * len(labelled(options.method)), options.output)
    sessions = sessions_of(options)
    planned_pictures = planned(found, [session.method for session in sessions], wanted, options.output)
    pictures = {image: list(group) for image, group in groupby(planned_pictures, lambda picture: picture.image)}
    announce_passes(sessions, len(found) * len(wanted))
    draw = comparer(sessions[0], options) if options.similar_to else explainer_of(sessions, options)
    size = min(1 if passes_of(each.explainer) > CHEAP else each.batch_size for each in sessions)
    failures = written = 0
    try:
        for start in range(0, len(found), size):
            for image, drawn in each_image(list(found)[start : start + size], draw):
                of_image = pictures[image]
                if isinstance(drawn, InputError):
                    failures += 1
                    reason = str(drawn).removeprefix(f"{image}: ")
                    print(f"explainers: {in_one_line(f'{of_image[0].name}: {reason}')}", file=sys.stderr, flush=True)
                    continue
                for picture, each in zip(of_image, drawn, strict=True):
                    each.save(picture.file)
                    written += 1
                    print(line_of(picture, each), flush=True)
    except KeyboardInterrupt as stopped:
        stopped.add_note(f"after {written} of {len(planned_pictures)} pictures")
        raise
    if written:
        print(f"Next: click through all classes, and hide patches by hand: {serving(options)}")
    return 1 if failures else 0


def each_image(
    images: Sequence[Path], draw: Callable[[Sequence[Path]], Sequence[Sequence[Drawn]]]
) -> Iterator[tuple[Path, Sequence[Drawn] | InputError]]:
    """Explain a batch, and yield what is drawn of each image, or what is wrong with it.

    If a batch cannot be explained, its images are explained one by one.
    """
    try:
        drawn = draw(images)
    except InputError as error:
        if len(images) == 1:
            yield images[0], error
            return
        for image in images:
            yield from each_image([image], draw)
        return
    yield from zip(images, drawn, strict=True)


def explainer_of(sessions: Sequence[Session], options: Namespace) -> Callable[[Sequence[Path]], list[list[Drawn]]]:
    """A function of a batch of images: the explanations of each, by each method, of all classes or texts wanted."""
    indices: list[int | None] = [class_of(sessions[0], wanted) for wanted in options.classes or ()]
    indices = indices or ([*range(len(options.texts))] if options.texts else [None])

    def explain_batch(images: Sequence[Path]) -> list[list[Drawn]]:
        photos, pixels = read_photos(images, sessions[0].target.grid.image_size, sessions[0].resampling)
        of_images: list[list[Drawn]] = [[] for _ in images]
        for session in sessions:
            name = photos[0].name if len(images) == 1 else f"{len(images)} images"
            passes = passes_of(session.explainer) * len(images) * len(indices)
            columns = [[index] * len(images) for index in indices]
            with progress_of_passes(f"{printable(name)} by {session.method}", passes):
                found = session.explain_batch(photos, pixels, columns, options.top, options.texts, options.against)
            for column in found:
                for of_image, explanation in zip(of_images, column, strict=True):
                    of_image.append(explanation)
        return of_images

    return explain_batch


def comparer(session: Session, options: Namespace) -> Callable[[Sequence[Path]], list[list[Drawn]]]:
    """A function of a batch of images: the comparison of each with another image, which is embedded once."""
    centre = mean_embedding(session, options.against) if options.against else None
    other = Embedded(session, [read_image(session, options.similar_to, "other")])

    def compare_batch(images: Sequence[Path]) -> list[list[Drawn]]:
        photos, pixels = read_photos(images, session.target.grid.image_size, session.resampling)
        return [
            [each] for each in compare_with(Embedded(session, list(zip(photos, pixels, strict=True))), other, centre)
        ]

    return compare_batch


def line_of(picture: Picture, drawn: Drawn) -> str:
    """The line that is printed about a picture."""
    if isinstance(drawn, Comparison):
        return compared_line(drawn, picture.name, picture.file)
    listed = ", ".join(f"{each.name} {each.score:.2f}" for each in drawn.classes)
    kind = drawn.quantity if drawn.kind == "text" else f"top {len(drawn.classes)}"
    return printable(f"{picture.name}: {drawn.title} by {drawn.method} -> {picture.file} ({kind}: {listed})")


def compared_line(comparison: Comparison, name: str, file: Path) -> str:
    """The line that is printed about the picture of a comparison."""
    likeness = f"{comparison.similarity:.2f} like {comparison.other_name}"
    return printable(f"{name}: {likeness} by {comparison.method} -> {file}")


def nearest(options: Namespace) -> int:
    """Find the images of a folder that are most like an image; write a picture and print a line for each."""
    check_writable(options.output)
    session = session_of(options)
    for number, comparison in enumerate(stream_nearest(session, options.image, options.folder, options.k), 1):
        file = options.output / picture_name(options.image, comparison.method, f"nearest {number}")
        comparison.save(file)
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
    sessions = [first, *(first.with_method(method, purpose) for method in methods[1:])]
    if getattr(options, "passes", None):
        set_passes(sessions, options.passes)
    return sessions


def model_and_methods(options: Namespace) -> tuple[str | nn.Module, str | None, list[Method]]:
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
    methods: list[Method] = [{name: chosen} if chosen else name for name, chosen in given]
    methods = methods if folder is None else [Path(folder)]
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
