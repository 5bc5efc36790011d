"""Answers the questions of browsers: they open images, and ask the views about those that they have opened."""

import asyncio
import base64
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.resources import files
from threading import Event
from typing import Any, get_type_hints

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from torch.nn.modules.module import register_module_forward_pre_hook

from explainers import Explainer
from explainers.app.page.images import OpenedImage, OpenedImages
from explainers.app.page.views import VIEWS, describe_image
from explainers.app.session import Session
from explainers.errors import InputError, fits
from explainers.images.decoding import decode_upload
from explainers.saved.files import printable

LARGEST_FILE = 20 * 2**20
"""Size of an uploaded file, in bytes."""

LARGEST_BODY = LARGEST_FILE * 4 // 3 + 2**20
"""Size of a question, in bytes: a file of the largest size in base64, with its name."""

MOST_BODIES = 64 * 2**20
"""Size of all questions that wait for their answers, in bytes."""

MOST_PIXELS = 24_000_000
"""Number of pixels that are decoded of an image."""

LONGEST_NAME = 100
"""Number of characters of a file's name that are kept, its last ones."""

EXAMPLE = "cat_and_coffee.jpg"
"""The photo that the empty page offers: docs/photos, in a smaller file."""


class Abandoned(Exception):
    """Ends a computation that nobody waits for any more."""


class Api:
    """Opens uploaded files, and answers questions about them, in one thread; nothing is written to the disk."""

    def __init__(self, session: Session, explainers: Mapping[str, Explainer]) -> None:
        self.session = session
        self.explainers = explainers
        self.images = OpenedImages()
        self._closing = Event()
        self._thread = ThreadPoolExecutor(1)
        self._size = 0

    def close(self) -> None:
        """End what is computed, before its next module, and what waits; return when nothing is computed any more."""
        self._closing.set()
        self._thread.submit(lambda: None).result()

    async def reply(self, request: Request) -> Response:
        """Answer a question, `{"name": ..., "question": {...}}`; refuse what the script of this page does not send."""
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "expected JSON")
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                self._size += len(part)
                if len(body) > LARGEST_BODY or self._size > MOST_BODIES:
                    raise HTTPException(413, f"expected a file of at most {LARGEST_FILE >> 20} MB, and few at once")
            name, question = parse_question(body)
            answer = await self._compute(name, question, request)
        except InputError as error:
            raise HTTPException(400, printable(str(error))) from error
        except (Abandoned, ClientDisconnect, asyncio.CancelledError) as error:
            raise HTTPException(503, "the server ends") from error
        finally:
            self._size -= len(body)
        return Response(json.dumps(answer, allow_nan=False), media_type="application/json")

    async def _compute(self, name: str, question: dict[str, Any], request: Request) -> dict[str, Any]:
        """Answer in the thread of the model, after the questions that came before, unless the visitor leaves."""
        left = Event()

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            left.set()

        watching = asyncio.create_task(watch())
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self.answer, name, question, left)
        finally:
            watching.cancel()
            left.set()  # also when the server cancels this

    def answer(self, name: str, question: dict[str, Any], left: Event) -> dict[str, Any]:
        """Answer a question of `FORMS`; or one line that says what a visitor can mend."""
        with stop_when(lambda: left.is_set() or self._closing.is_set()), self.session.computing():
            try:
                return self.open_image(**question) if name == "open_image" else self.ask(name, **question)
            except InputError as error:
                return {"error": printable(str(error))}

    def open_image(self, name: str = EXAMPLE, data: str | None = None) -> dict[str, Any]:
        """Open a file, its `name` and its `data` in base64, or without them the example: what a browser draws of it."""
        name = printable(name[-LONGEST_NAME:])
        try:
            content = read_file(f"static/{EXAMPLE}") if data is None else base64.b64decode(data, validate=True)
        except ValueError as error:
            raise InputError(f"{name}: expected an image, got {error}: drop it again") from error
        decoded = decode_upload(name, content, MOST_PIXELS)
        image = OpenedImage(self.session, decoded, name, self.explainers)
        return describe_image(image) | {"key": self.images.add(image)}

    def ask(self, view: str, image: str, **question: Any) -> dict[str, Any]:
        """Ask one of the `VIEWS` about the image whose key a browser knows."""
        opened = self.images.find(image)
        if "other" in question:
            question["other"] = self.images.find(question["other"])
        asked = [question["method"]] if "method" in question else question.get("methods", [])
        unknown = [method for method in asked if method not in opened.explainers]
        if unknown:
            raise InputError(f"expected one of {', '.join(opened.explainers)}, got {unknown[0]!s:.60}")
        return VIEWS[view](opened, **question)


Form = Mapping[str, tuple[Any, bool]]
"""Name of an argument → its type, and whether it is needed."""


def read_form(function: Callable[..., Any]) -> Form:
    """Read what a question for a function has. Images are given by their keys."""
    hints = get_type_hints(function)
    return {
        name: (str if hints[name] is OpenedImage else hints[name], parameter.default is parameter.empty)
        for name, parameter in inspect.signature(function).parameters.items()
    }


FORMS = {name: read_form(view) for name, view in VIEWS.items()} | {
    "open_image": {"name": (str, False), "data": (str, False)}
}
"""Name of a question → its form."""


def parse_question(body: bytes | bytearray) -> tuple[str, dict[str, Any]]:
    """Read the name and the arguments of a question; an InputError unless it has one of the `FORMS`."""
    try:
        name, question = (json.loads(body)[each] for each in ("name", "question"))
        form = FORMS[name]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise InputError(f"expected a name, one of {', '.join(FORMS)}, and a question, got {body[:60]!r}") from error
    if not isinstance(question, dict):
        raise InputError(f"expected a question as an object, got {question!s:.60}")
    for key in [*question, *(key for key, (_, needed) in form.items() if needed)]:
        if key not in form or not fits(question.get(key), form[key][0]):
            raise InputError(
                f"expected {', '.join(form)}, each of its type, got {question.get(key)!s:.60} as {key:.60}"
            )
    return name, question


@contextmanager
def stop_when(unwanted: Callable[[], bool]) -> Iterator[None]:
    """Raise an `Abandoned`, at once or before the next module that this thread calls, when nobody wants the result."""
    thread = threading.get_ident()

    def check(*_: Any) -> None:
        if threading.get_ident() == thread and unwanted():
            raise Abandoned

    check()
    with register_module_forward_pre_hook(check):
        yield


def read_file(name: str) -> bytes:
    """The bytes of a file of this room."""
    return files(__package__).joinpath(name).read_bytes()
