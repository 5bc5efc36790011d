"""The command `explainers`: explain images, serve the page, list what there is, compare explainers."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn, TextIO

from explainers import __version__
from explainers.errors import InputError

DEFAULT_MODEL = "vit_tiny_patch16_224"

EXAMPLES = """examples:
  explainers explain photo.jpg                          the predicted class, as explained/photo.png
  explainers explain photos/ --class tabby "espresso"   two classes of all images in a folder
  explainers explain photo.jpg --model resnet50 --method GradCAM --output map.png
  explainers explain photo.jpg --explainer runs/anyhead_pets
  explainers explain photo.jpg --model vit_base_patch16_clip_quickgelu_224.openai --text "a cat" "a dog"
  explainers explain a.jpg --similar-to b.jpg           why two images are alike
  explainers nearest photo.jpg photos/                  the most similar images of a folder, and why
  explainers serve                                      the same in the browser, by clicks
  explainers list --model resnet50                      what explains this model
  explainers benchmark photos/ --methods GAE,RISE       which explainer is the most faithful on these images"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: words of the command line; `None` for those of this process.

    Returns:
        Exit status: 0; 1 for an error that the message says how to correct; 130 after Ctrl-C. Wrong options exit with
        2 by `SystemExit`.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for names of files, where a terminal has few characters
    options = parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _one_line  # type: ignore[assignment]
            run = getattr(import_module(options.module), options.run)  # here, because what computes takes seconds
            return run(options) or 0
    except InputError as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return _failed("stopped", 130)
    except BrokenPipeError:  # as in `explainers list | head -1`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 1
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        return _failed(f"cannot read or write {error.filename}: {error.strerror}: use another path")


def _failed(message: str, status: int = 1) -> int:
    print(f"explainers: {message}", file=sys.stderr, flush=True)
    return status


def _one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning without the line of code that gave it; the arguments are those of `warnings.showwarning`."""
    print(f"explainers: {message}", file=sys.stderr, flush=True)


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
    commands = command.add_subparsers(title="commands", metavar="COMMAND", required=True)
    model = _model_options()
    _add_explain(commands, [model, _method_options()])
    _add_nearest(commands, [model, _method_options()])
    _add_serve(commands, [model, _method_options()])
    _add_list(commands, [model])
    _add_benchmark(commands, [model])
    return command


def _model_options() -> Parser:
    options = Parser(add_help=False)
    options.add_argument("--model", metavar="NAME", help=f"name of a model of timm (default: {DEFAULT_MODEL})")
    options.add_argument("--weights", metavar="FILE", help="its weights, .safetensors or .pth (default: timm's)")
    options.add_argument("--head", metavar="FILE", help="head.safetensors of another task on the same backbone")
    options.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:1 (default: a GPU if there is one)")
    return options


def _method_options() -> Parser:
    options = Parser(add_help=False)
    how = options.add_mutually_exclusive_group()
    how.add_argument("--method", default="auto", metavar="NAME", help="see `explainers list` (default: auto)")
    how.add_argument(
        "--explainer", metavar="FOLDER", help="a trained explainer: the folder of a run, or hf://user/name"
    )
    return options


def _add_explain(commands: Any, parents: list[Parser]) -> None:
    add = commands.add_parser(
        "explain",
        parents=parents,
        usage="%(prog)s IMAGE [IMAGE ...] [--class CLASS ... | --text TEXT ... | --similar-to IMAGE] [options]",
        help="explain images, and write annotated pictures",
    )
    add.add_argument("images", nargs="+", metavar="IMAGE", help="files or folders")
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
        metavar="TEXT",
        help="texts from which each --text is told apart; or images with --similar-to",
    )
    add.add_argument("--top", type=positive, default=5, metavar="K", help="classes in a line (default: 5)")
    add.add_argument(
        "--output", default="explained", metavar="PATH", help="a folder, or a file for one picture (default: explained)"
    )
    add.set_defaults(module="explainers.app.explain_command", run="explain")


def _add_nearest(commands: Any, parents: list[Parser]) -> None:
    add = commands.add_parser(
        "nearest", parents=parents, help="find the images of a folder that are most like an image, and show why"
    )
    add.add_argument("image", metavar="IMAGE", help="a file")
    add.add_argument("folder", metavar="FOLDER", help="the images to choose from, with all folders below it")
    add.add_argument("--k", type=positive, default=5, metavar="K", help="number of images (default: 5)")
    add.add_argument("--output", default="explained", metavar="FOLDER", help="for the pictures (default: explained)")
    add.set_defaults(module="explainers.app.explain_command", run="nearest")


def _add_serve(commands: Any, parents: list[Parser]) -> None:
    add = commands.add_parser("serve", parents=parents, help="explain images in the browser")
    add.add_argument("--port", type=int, default=7860, help="(default: 7860)")
    add.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets other machines in")
    add.add_argument("--domain", metavar="NAME", help="its name for browsers, such as a proxy's; * for a public page")
    add.add_argument("--open", action="store_true", help="open the browser")
    add.set_defaults(module="explainers.app.explain_command", run="serve")


def _add_list(commands: Any, parents: list[Parser]) -> None:
    add = commands.add_parser("list", parents=parents, help="list trained explainers and methods")
    add.set_defaults(module="explainers.app.list_command", run="list_all")


def _add_benchmark(commands: Any, parents: list[Parser]) -> None:
    add = commands.add_parser("benchmark", parents=parents, help="compare how faithful explainers are on your images")
    add.add_argument("images", nargs="+", metavar="IMAGE", help="files or folders")
    add.add_argument(
        "--methods", type=names, metavar="A,B", help="compared with chance (default: auto and a few others)"
    )
    add.add_argument("--limit", type=positive, default=100, metavar="N", help="the first N images (default: 100)")
    add.add_argument("--output", default="benchmark.json", metavar="FILE", help="(default: benchmark.json)")
    add.set_defaults(module="explainers.app.benchmark_command", run="benchmark")


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text}")
    return int(text)


def names(text: str) -> list[str]:
    """Names that commas separate.

    >>> names("GAE, RISE")
    ['GAE', 'RISE']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def printed(text: str) -> str:
    """A text with characters that the terminal has: ± and ⁺ become +- and + where it lacks them.

    >>> printed("Fidelity⁺").encode(sys.stdout.encoding or "ascii").decode(sys.stdout.encoding or "ascii")[:8]
    'Fidelity'
    """
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        for character, plain in {"±": "+-", "⁺": "+", "⁻": "-", "↑": "^", "↓": "v", "–": "-"}.items():
            text = text.replace(character, plain)
    return text
