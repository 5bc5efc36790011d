"""`explainers explain`, `explainers nearest` and `explainers serve`; no picture replaces an image that is explained."""

import json
import os
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from explainers.app.choosing import CHEAP, estimate_passes
from explainers.app.command import print_error
from explainers.app.comparing import Comparison, Embedded, compare_with, embed_image, mean_embedding, stream_nearest
from explainers.app.explanation import Explanation, picture_name
from explainers.app.manifest import describe_explanation, write_heatmap, write_manifest
from explainers.app.options import announce_passes, find_classes, model_and_methods, start_sessions
from explainers.app.photos import list_photos
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.images.bands import ARRAYS
from explainers.images.listing import endings, list_images, several
from explainers.masking import read_size
from explainers.posthoc.names import label_methods
from explainers.runtime.progress import show_passes
from explainers.saved.files import printable

Drawn = Explanation | Comparison
Draw = Callable[[Sequence[Path]], Sequence[Sequence[Drawn]]]
"""A function of the files of a batch → the pictures of each image."""


def explain(options: Namespace) -> int:
    """Explain images, write a picture of each, and print a line for each.

    Returns:
        1 if an image that was named, or every image, could not be explained, else 0.
    """
    wanted = options.texts or options.classes or [options.similar_to and f"like {Path(options.similar_to).stem}"]
    names = find_images(options.images, len(wanted) * len(label_methods(options.method)), options.output)
    images = list(names)
    sessions = start_sessions(options)
    pictures = plan_pictures(names, [session.method for session in sessions], wanted, options.output)
    announce_passes(sessions, len(images) * len(wanted), options.against or ())
    draw = make_comparer(sessions[0], options) if options.similar_to else make_explainer(sessions, options)
    alone = options.batch_size is None and any(estimate_passes(each.explainer) > CHEAP for each in sessions)
    size = 1 if alone else min(each.batch_size for each in sessions)
    failed: dict[Path, str] = {}
    written: list[dict[str, Any]] = []
    try:
        for start in range(0, len(images), size):
            for image, drawn in draw_images(images[start : start + size], draw):
                name = names[image].as_posix()
                try:
                    if isinstance(drawn, InputError):
                        raise drawn
                    for file, each in zip(pictures[image], drawn, strict=True):  # which decodes the photo again
                        written.append(write_files(each, name, file, options))
                except InputError as error:
                    failed[image] = str(error).removeprefix(f"{image}: ")
                    print_error(InputError(f"{name}: {failed[image]}", *error.settings))
    except KeyboardInterrupt as stopped:
        stopped.add_note(f"after {len(written)} of {sum(map(len, pictures.values()))} pictures")
        raise
    if options.json or options.npy:
        single = is_picture_file(options.output)
        reasons = {names[image].as_posix(): reason for image, reason in failed.items()}
        write_manifest(options.output.parent if single else options.output, sessions, written, reasons)
    if written and not options.json:
        print(f"Next: click through all classes, and hide patches by hand: {command_to_serve(options)}")
    if failed and len(images) > 1:
        print_error(f"left out: {several([*failed])}, of {len(images)} images")
    named = {real_path(Path(os.path.expanduser(each))) for each in options.images}
    return 1 if len(failed) == len(images) or named & failed.keys() else 0


def write_files(drawn: Drawn, name: str, file: Path, options: Namespace) -> dict[str, Any]:
    """Write the picture of an explanation and, if wanted, its heatmaps; print and return what it is."""
    files = {"picture": drawn.save(file, smooth=not options.patches)}
    if options.npy:
        files["heatmap"] = write_heatmap(drawn.heatmap, file.with_suffix(".npy"))
        if isinstance(drawn, Comparison):
            files["other_heatmap"] = write_heatmap(drawn.other_heatmap, file.with_name(f"{file.stem}_other.npy"))
    described = describe_explanation(drawn, name, files)
    print(json.dumps(described) if options.json else describe(drawn, name, file), flush=True)
    return described


def draw_images(images: Sequence[Path], draw: Draw) -> Iterator[tuple[Path, Sequence[Drawn] | InputError]]:
    """Explain a batch, and yield the pictures of each image, or its error.

    If a batch cannot be explained, its images are explained one by one.
    """
    try:
        drawn = draw(images)
    except InputError as error:
        if len(images) == 1:
            yield images[0], error
            return
        for image in images:
            yield from draw_images([image], draw)
        return
    yield from zip(images, drawn, strict=True)


def make_explainer(sessions: Sequence[Session], options: Namespace) -> Draw:
    """A function that explains all wanted classes or texts of images, by each method."""
    if options.texts:
        indices: Sequence[int | None] = range(len(options.texts))
        others = options.against or ()
    else:
        chosen, others = find_classes(sessions[0], options)
        indices = chosen or [None]

    def draw(images: Sequence[Path]) -> Sequence[Sequence[Drawn]]:
        photos, pixels = sessions[0].decode(list_photos(images))
        name = photos[0].name if len(images) == 1 else f"{len(images)} images"
        wanted = [[index] * len(images) for index in indices]
        columns: list[list[Explanation]] = []
        for session in sessions:
            passes = estimate_passes(session.explainer, others) * len(images) * len(indices)
            with show_passes(f"{printable(name)} by {session.method}", passes):
                columns += session.explain_batch(photos, pixels, wanted, options.top, options.texts, others)
        return [*zip(*columns, strict=True)]

    return draw


def make_comparer(session: Session, options: Namespace) -> Draw:
    """A function that compares images with another one, which is embedded once."""
    centre = mean_embedding(session, options.against) if options.against else None
    other = embed_image(session, options.similar_to, "similar_to")

    def draw(images: Sequence[Path]) -> list[list[Drawn]]:
        embedded = Embedded(session, *session.decode(list_photos(images)))
        return [[each] for each in compare_with(embedded, other, centre)]

    return draw


def describe(drawn: Drawn, name: str, file: Path) -> str:
    """The line that is printed about the picture of an image."""
    if isinstance(drawn, Comparison):
        return printable(f"{name}: {drawn.similarity:.2f} like {drawn.other_name} by {drawn.method} -> {file}")
    listed = ", ".join(map(drawn.write, drawn.classes))
    kind = drawn.quantity if drawn.kind == "text" else f"top {len(drawn.classes)}"
    return printable(f"{name}: {drawn.title} by {drawn.method} -> {file} ({kind}: {listed})")


def nearest(options: Namespace) -> None:
    """Find the images of a folder that are most like an image; write a picture and print a line for each."""
    check_writable(options.output)
    (session,) = start_sessions(options)
    for number, found in enumerate(stream_nearest(session, options.image, options.folder, options.k), 1):
        file = options.output / picture_name(options.image, found.method, f"nearest {number}")
        found.save(file, smooth=not options.patches)
        print(f"{number}. {describe(found, found.name, file)}", flush=True)


def serve(options: Namespace) -> None:
    """Serve the page until Ctrl-C."""
    from explainers.app.page import serve as serve_page  # with Starlette, which not everybody has

    model, methods = model_and_methods(options)
    serve_page(
        Session(model, methods[0]),
        host=options.host,
        port=options.port,
        open_browser=options.open,
        domain=options.domain,
        audit=options.audit,
    )


def command_to_serve(options: Namespace) -> str:
    """The command that serves the page for the same model and explainer."""
    chosen = {
        name: getattr(options, name) for name in ("model", "weights", "head", "class_names", "score", "explainer")
    }
    method = next(iter(label_methods(options.method)))
    chosen["method"] = None if method == "auto" else method
    if options.image_size:
        chosen["image_size"] = "x".join(map(str, read_size(options.image_size)))
    words = [word for name, value in chosen.items() if value for word in (f"--{name.replace('_', '-')}", value)]
    return shlex.join(["explainers", "serve", *words])


def find_images(images: Sequence[str], pictures: int, output: Path) -> dict[Path, Path]:
    """Find image files: each → its name below its folder. Nothing is computed before it is known that all is well.

    An InputError is raised for images that do not exist, for an `output` that cannot be written to, or is a file for
    several `pictures` of each image, or would replace an image. Pictures that it holds already are left out.
    """
    single = is_picture_file(output)
    folder = output.parent if single else output
    found = dict(_list_files(images, folder))
    count = len(found) * pictures
    if single and count > 1:
        raise InputError(f"expected a folder for {count} pictures, got --output {output}: leave out {output.suffix}")
    if single and real_path(output) in found:
        raise InputError(f"expected another file than the image itself, got --output {output}: rename it")
    check_writable(folder)
    return found


def plan_pictures(
    names: Mapping[Path, Path], methods: Sequence[str], explained: Sequence[str | None], output: Path
) -> dict[Path, list[Path]]:
    """The files of the pictures of each image: one for each method, and class or text, which their names say.

    No two are the same, and none is an image. `names` comes from `find_images`; a class of `None` is the predicted one.
    """
    if is_picture_file(output):
        return {image: [output] for image in names}
    pictures: dict[Path, list[Path]] = {image: [] for image in names}
    taken = set(names)
    for image, name in names.items():
        for method, each in product(methods, explained):
            plain = file = output / name.parent / picture_name(name.name, method, each)
            number = 1
            while real_path(file) in taken:
                number += 1
                file = plain.with_name(f"{plain.stem}_{number}{plain.suffix}")
            taken.add(real_path(file))
            pictures[image].append(file)
    return pictures


def is_picture_file(output: Path) -> bool:
    """Whether an output is a file for one picture, not a folder."""
    return output.suffix.lower() in endings() and not output.is_dir()


def _list_files(images: Sequence[str], output: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each image file, and its name below its folder; without pictures that were written to `output` before."""
    for given in images:
        folder = Path(os.path.expanduser(given))
        if not folder.is_dir():
            list_photos(given)  # says what is wrong with it
            yield real_path(folder), Path(folder.name)
            continue
        (files,) = list_images([folder], ARRAYS)
        if not real_path(folder).is_relative_to(real_path(output)):
            files = [file for file in files if not real_path(file).is_relative_to(real_path(output))]
        if not files:
            raise InputError(f"expected images below {folder}, got none: give another folder")
        yield from ((real_path(file), file.relative_to(folder)) for file in files)


def real_path(file: Path) -> Path:
    """The path without links; `Path.resolve` raises an error for a loop of links."""
    return Path(os.path.realpath(file))


def check_writable(folder: Path) -> None:
    """Create a folder, and raise an InputError if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"expected a folder for pictures, got {folder}: {error.strerror}; give --output") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"expected a folder that can be written to, got {folder}: give another --output")
