"""The command `explainers`: explain images, serve the page, list what there is, compare explainers, audit models."""

import argparse
import errno
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from explainers import __version__
from explainers.app.argument_types import (
    parse_bands,
    parse_methods,
    parse_number,
    parse_path,
    parse_positive,
    parse_size,
    parse_white,
)
from explainers.errors import InputError
from explainers.saved.files import printable

DEFAULT_MODEL = "vit_tiny_patch16_224"

ABSENT = (
    *("bands", "white", "score", "texts", "classes", "similar_to", "against", "passes", "batch_size", "explainer"),
    *("image_size", "k"),
)
"""Options that only some commands have; `None` for the others."""

OPTIONS = {"classes": "--class", "target": "--model NAME --weights", "image": "IMAGE"}
"""Settings of the library that have another name here; an option has dashes, as --image-size."""

EXAMPLES = """examples:
  explainers explain photo.jpg                          the predicted class, as explained/photo_AnyHead.png
  explainers explain photos/ --class tabby "espresso"   two classes of all images in a folder
  explainers explain photo.jpg --model resnet50 --method GradCAM --output map.png
  explainers explain photo.jpg --method "GAE,RISE(masks=500)"  two methods, one of them with an option
  explainers explain photo.jpg --explainer runs/anyhead_pets
  explainers explain photo.jpg --model vit_base_patch16_clip_quickgelu_224.openai --text "a cat" "a dog"
  explainers explain a.jpg --similar-to b.jpg           why two images are alike
  explainers nearest photo.jpg photos/                  the most similar images of a folder, and why
  explainers serve                                      the same in the browser, by clicks
  explainers list --model resnet50                      what explains this model
  explainers benchmark photos/ --methods GAE,RISE       which explainer is the most faithful on these images
  explainers audit photos/ --labels folder              what the model relies on in all images, suspicious things first
  explainers audit photos/ --without 3 7                a head without two of the groups that the audit found"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: words of the command line; `None` for those of this process.

    Returns:
        Exit status: 0; 1 for an error that the message says how to correct; 128 and the number of the signal after
        Ctrl-C, SIGTERM or SIGHUP. Wrong options exit with 2 by `SystemExit`.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for names of files, where a terminal has few characters
    options = parser().parse_args(arguments)
    try:
        with warnings.catch_warnings(), _end_by_signals():
            warnings.showwarning = partial(print_warning, set())  # type: ignore[assignment]
            run = getattr(import_module(options.module), options.run)  # here, because what computes takes seconds
            status = run(options) or 0
            sys.stdout.flush()  # here, where a full disk gives one line
            return status
    except InputError as error:
        print_error(error)
        return 1
    except KeyboardInterrupt as stopped:
        print_error(" ".join(["stopped", *getattr(stopped, "__notes__", [])]))
        return 128 + (stopped.args[0] if isinstance(stopped, Ended) else signal.SIGINT)
    except BrokenPipeError:  # as in `explainers list | head -1`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        return 1
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if error.strerror is None or error.filename is None and not full:
            raise
        if error.filename is None:  # the output of this command: Python would try to write the rest as it exits
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        advice = "free some space, or use another path" if full else "use another path"
        print_error(f"cannot read or write {error.filename or 'the output'}: {error.strerror}: {advice}")
        return 1


class Ended(KeyboardInterrupt):
    """A signal, whose number is the argument, has asked this process to end."""


@contextmanager
def _end_by_signals() -> Iterator[None]:
    """End as after Ctrl-C on SIGTERM and SIGHUP, so that no half-written file stays; nohup's choice stays as it is."""

    def end(number: int, _: Any) -> NoReturn:
        raise Ended(number)

    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def print_warning(printed: set[str], message: Warning, *_: Any, **__: Any) -> None:
    """Print a warning in place of `warnings.showwarning`, once: an image is decoded again for its picture."""
    if str(message) not in printed:
        printed.add(str(message))
        print_error(message)


def print_error(message: Exception | str) -> None:
    """Print an error or a warning in one line, with the options of this command.

    Characters that could steer the terminal are left out.
    """
    line = " ".join((message.spell(name_option) if isinstance(message, InputError) else str(message)).splitlines())
    print(f"explainers: {printable(line)}", file=sys.stderr, flush=True)


def name_option(name: str, value: str) -> str:
    """Write a setting of the library as it is typed here, with a value of several numbers.

    >>> name_option("image_size", "(16, 32)"), name_option("classes", "")
    ('--image-size=16x32', '--class')
    """
    option = OPTIONS.get(name, f"--{name.replace('_', '-')}")
    return f"{option}={value.strip('()').replace(', ', 'x' if name == 'image_size' else ',')}" if value else option


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help shows all options)\n")


def parser() -> Parser:
    """The options of all commands."""
    command = Parser(
        prog="explainers",
        description="Show what a vision model sees in images.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    command.set_defaults(**dict.fromkeys(ABSENT), method=["auto"])
    commands = command.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_explain, _add_nearest, _add_serve, _add_list, _add_benchmark, _add_audit):
        add(commands)
    return command


SHARED: dict[str, dict[str, Any]] = {
    "--model": {
        "metavar": "NAME",
        "help": f"name of a model of timm, local-dir:FOLDER or hf-hub:USER/NAME (default: {DEFAULT_MODEL})",
    },
    "--weights": {"metavar": "FILE", "help": "its weights, .safetensors, .pth or .ckpt (default: timm's)"},
    "--head": {"metavar": "FILE", "help": "head.safetensors of another task on the same backbone"},
    "--class-names": {"metavar": "FILE", "help": "names of its classes, one in a line, or a JSON list"},
    "--device": {"metavar": "NAME", "help": "cpu, cuda or cuda:1 (default: a GPU if there is one)"},
    "--image-size": {
        "type": parse_size,
        "metavar": "PIXELS",
        "help": "448, or 224x448 for height and width: more pixels give more patches (default: the model's own)",
    },
    "--score": {
        "choices": ("softmax", "sigmoid", "value"),
        "help": "what its outputs mean: one class, several at once, or numbers, as of a regression (default: softmax)",
    },
    "--method": {
        "type": parse_methods,
        "action": "extend",
        "default": argparse.SUPPRESS,  # which leaves the default of all commands
        "metavar": "NAME",
        "help": "see `explainers list`; with options as in 'RISE(masks=500)' (default: auto)",
    },
    "--explainer": {"metavar": "FOLDER", "help": "a trained explainer: the folder of a run, or hf://user/name"},
    "--passes": {
        "type": parse_positive,
        "metavar": "N",
        "help": "forward passes of methods that choose their number, such as RISE; others are refined by N passes",
    },
    "--white": {
        "type": parse_white,
        "metavar": "VALUE",
        "help": "value of white in images of more than 8 bits, such as 4095; or of black and white: --white=-1,1",
    },
    "--bands": {
        "type": parse_bands,
        "metavar": "R,G,B",
        "help": "of a model of 4 channels or more, those that pictures show, numbered from 0 (default: 0,1,2)",
    },
    "--batch-size": {
        "type": parse_positive,
        "metavar": "N",
        "help": "images at once (default: what fits into 4 GB)",
    },
    "--patches": {"action": "store_true", "help": "patches with sharp edges in the pictures, not smooth ones"},
}
"""Options of several commands → what argparse takes of them."""

MODEL = "--model", "--weights", "--head", "--class-names", "--device"


def _add_shared(add: Any, *names: str) -> None:
    for name in names:
        add.add_argument(name, **SHARED[name])


def _add_method(add: Parser) -> None:
    _add_shared(add.add_mutually_exclusive_group(), "--method", "--explainer")


def _add_explain(commands: Any) -> None:
    add = commands.add_parser(
        "explain",
        usage="%(prog)s IMAGE [IMAGE ...] [--class CLASS ... | --text TEXT ... | --similar-to IMAGE] [options]",
        help="explain images, and write annotated pictures",
    )
    _add_shared(add, *MODEL, "--image-size", "--score")
    _add_method(add)
    _add_shared(add, "--passes")
    add.add_argument("images", nargs="+", metavar="IMAGE", help="files or folders")
    _add_explained(add)
    _add_shared(add, "--white", "--bands")
    add.add_argument("--top", type=parse_positive, default=5, metavar="K", help="classes in a line (default: 5)")
    add.add_argument(
        "--output",
        type=parse_path,
        default="explained",
        metavar="PATH",
        help="a folder, or a file for one picture (default: explained)",
    )
    _add_shared(add, "--patches")
    add.add_argument(
        "--json", action="store_true", help="print a JSON object for each picture, and write manifest.json"
    )
    add.add_argument("--npy", action="store_true", help="write heatmaps beside pictures, as .npy, and manifest.json")
    _add_shared(add, "--batch-size")
    add.set_defaults(module="explainers.app.explain_command", run="explain")


def _add_explained(add: Parser) -> None:
    what = add.add_mutually_exclusive_group()
    what.add_argument(
        "--class",
        dest="classes",
        nargs="+",
        action="extend",
        metavar="CLASS",
        help="behind the images: classes to explain, by name or number, a picture for each (default: the predicted)",
    )
    what.add_argument(
        "--text",
        dest="texts",
        nargs="+",
        action="extend",
        metavar="TEXT",
        help="texts to explain, with a model of CLIP or SigLIP, a picture for each",
    )
    what.add_argument(
        "--similar-to", metavar="IMAGE", help="another image: which patches make the images like it, and it like them"
    )
    add.add_argument(
        "--against",
        nargs="+",
        action="extend",
        metavar="OTHER",
        help="why not these? classes from which each --class, or texts from which each --text, is told apart; or images"
        " with --similar-to",
    )


def _add_nearest(commands: Any) -> None:
    add = commands.add_parser("nearest", help="find the images of a folder that are most like an image, and show why")
    _add_shared(add, *MODEL, "--image-size")
    _add_method(add)
    add.add_argument("image", metavar="IMAGE", help="a file")
    add.add_argument("folder", metavar="FOLDER", help="the images to choose from, with all folders below it")
    add.add_argument("--k", type=parse_positive, default=5, metavar="K", help="number of images (default: 5)")
    add.add_argument(
        "--output", type=parse_path, default="explained", metavar="FOLDER", help="for the pictures (default: explained)"
    )
    _add_shared(add, "--batch-size", "--patches", "--white", "--bands")
    add.set_defaults(module="explainers.app.explain_command", run="nearest")


def _add_serve(commands: Any) -> None:
    add = commands.add_parser("serve", help="explain images in the browser")
    _add_shared(add, *MODEL, "--image-size", "--score")
    _add_method(add)
    add.add_argument("--port", type=int, default=7860, help="(default: 7860)")
    add.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets other machines in")
    add.add_argument("--domain", metavar="NAME", help="its name for browsers, such as a proxy's; * for a public page")
    add.add_argument("--open", action="store_true", help="open the browser")
    add.add_argument("--audit", type=parse_path, metavar="FOLDER", help="show the page of an audit in a second tab")
    add.set_defaults(module="explainers.app.explain_command", run="serve")


def _add_list(commands: Any) -> None:
    add = commands.add_parser("list", help="list trained explainers and methods")
    _add_shared(add, *MODEL)
    add.set_defaults(module="explainers.app.list_command", run="list_all")


def _add_benchmark(commands: Any) -> None:
    add = commands.add_parser("benchmark", help="compare how faithful explainers are on your images")
    _add_shared(add, *MODEL, "--image-size", "--score", "--passes")
    add.add_argument("images", nargs="+", metavar="IMAGE", help="files or folders")
    add.add_argument(
        "--methods", type=parse_methods, action="extend", metavar="A,B", help="beside chance (default: auto and others)"
    )
    add.add_argument("--limit", type=parse_positive, default=100, metavar="N", help="the first N images (default: 100)")
    add.add_argument(
        "--output", type=parse_path, default="benchmark.json", metavar="FILE", help="(default: benchmark.json)"
    )
    _add_shared(add, "--batch-size", "--white")
    add.set_defaults(module="explainers.app.benchmark_command", run="benchmark")


def _add_audit(commands: Any) -> None:
    add = commands.add_parser("audit", help="find what a model relies on in all images of a folder")
    _add_shared(add, *MODEL, "--image-size", "--score")
    _add_method(add)
    add.add_argument("folder", type=parse_path, metavar="FOLDER", help="the images, with all folders below it")
    add.add_argument(
        "--labels",
        metavar="folder|FILE",
        help="folder: the folders below FOLDER are the classes of its images; or a .csv or .json with the class of each"
        " (default: none)",
    )
    add.add_argument(
        "--texts", nargs="+", metavar="TEXT", help="what groups may show, named with a model of CLIP or SigLIP"
    )
    add.add_argument(
        "--masks", type=parse_path, metavar="FOLDER", help="masks of the objects, with the names of the images"
    )
    add.add_argument(
        "--mask-value",
        nargs="+",
        metavar="VALUE",
        help="values of the object in masks with several, such as 1, or 128-255 (default: the only one beside 0)",
    )
    add.add_argument(
        "--groups", type=parse_positive, metavar="K", help="groups of each class (default: chosen for each class)"
    )
    add.add_argument(
        "--passes", type=parse_positive, metavar="N", help="forward passes that hide patches (default: 20000)"
    )
    add.add_argument(
        "--without",
        type=parse_number,
        nargs="+",
        metavar="GROUP",
        help="after an audit: write a head that relies less on these groups, by their numbers",
    )
    add.add_argument("--strength", type=float, metavar="X", help="of this repair (default: the least reliance)")
    add.add_argument(
        "--output", type=parse_path, default="audit", metavar="FOLDER", help="of this audit alone (default: audit)"
    )
    _add_shared(add, "--batch-size", "--white", "--bands")
    add.set_defaults(module="explainers.app.audit_command", run="audit")
