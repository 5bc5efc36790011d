"""Answers the questions of browsers: about images that they open, and about those that they have opened."""

import base64
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.resources import files
from threading import Event
from typing import Any

from explainers.app.page.answers import ANSWERS, checked_methods, opened
from explainers.app.page.shown import Shown
from explainers.app.page.turns import LEFT, Turns, VisitorLeft, check_present
from explainers.app.page.visits import Visits
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.images.decoding import decode_upload
from explainers.saved.files import printable

LARGEST_FILE = 20 * 2**20
"""Size of an uploaded file, in bytes."""

MOST_PIXELS = 24_000_000
"""Number of pixels that are decoded of an image."""

LONGEST_NAME = 100
"""Number of characters of a file's name that are kept, its last ones."""

EXAMPLE = "cat_and_coffee.jpg"
"""The photo in this folder that the empty page offers: docs/photos, in a smaller file."""

OPENED_AT_ONCE, SHORT_AT_ONCE, SLOW_AT_ONCE = 1, 4, 2
"""Number of images that are decoded together, and of questions whose answers are computed in turns; the others wait."""

LOOKS_EVERY = 0.5
"""Time between two looks whether a visitor has left, in seconds."""

Answer = Callable[..., dict[str, Any]]


class Images:
    """Opens uploaded files, and finds them again; nothing is written to the disk.

    Args:
        session: see `Shown`.
        explainers: see `Shown`.
        visits: the opened images.
    """

    def __init__(self, session: Session, explainers: Mapping[str, Any], visits: Visits) -> None:
        self.session = session
        self.explainers = explainers
        self.visits = visits
        self.turns = Turns()

    def open_image(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Open a file, its `name` and its `data` in base64, or without them the example: what a browser draws of it."""
        if "data" in question:
            name = printable(str(question.get("name", ""))[-LONGEST_NAME:])
            data = bytes_of(name, question["data"])
        else:
            name, data = EXAMPLE, file_of_room(EXAMPLE)
        key = self.visits.key_of(name, data)
        shown = self.visits.get(key)
        if shown is None:
            check_present()
            image = decode_upload(name, data, MOST_PIXELS)
            shown = self.visits.add(key, Shown(self.session, image, name, self.explainers, self.turns))
        return opened(shown) | {"key": key}

    def ask(self, answer: Answer, question: dict[str, Any]) -> dict[str, Any]:
        """One of `ANSWERS` about the image whose key a browser knows."""
        checked_methods(question, [*self.explainers, self.session.method])
        shown = self.visits.find(question.pop("key", ""))
        if "other" in question:
            question["other"] = self.visits.find(question["other"])
        try:
            return answer(shown, **question)
        finally:
            self.visits.trim()

    def takes_long(self, question: Mapping[str, Any]) -> bool:
        """Whether a slow method has to compute the answer; False for a question that will be refused."""
        methods = [question["method"]] if "method" in question else question.get("methods", [])
        try:
            shown = self.visits.find(question.get("key", ""))
            index = shown.checked(question.get("index"), question.get("against", ()))
        except InputError:
            return False
        return any(shown.takes_long(method, index) for method in methods if method in shown.explainers)


def file_of_room(name: str) -> bytes:
    """The bytes of a file of this room."""
    return files(__package__).joinpath(name).read_bytes()


def bytes_of(name: str, data: str) -> bytes:
    """The bytes of an uploaded file; an InputError if it is too large or no base64."""
    if len(data) > LARGEST_FILE * 4 // 3 + 4:
        raise InputError(
            f"{name}: expected a file of at most {LARGEST_FILE >> 20} MB, got a larger one: make it smaller"
        )
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise InputError(f"{name}: expected an image, got {error}: drop it again") from error


def replies(images: Images) -> list[Callable[..., Awaitable[dict[str, Any]]]]:
    """The functions that browsers call, by the names of the answers, and `open_image`.

    Uploads, short and slow questions wait in three queues, without threads. What visitors asked before they left is not
    computed.
    """
    import anyio
    from gradio import Request

    opening, short, slow = map(anyio.CapacityLimiter, (OPENED_AT_ONCE, SHORT_AT_ONCE, SLOW_AT_ONCE))

    def queue(name: str, question: dict[str, Any]) -> Any:
        if name == "open_image":
            return opening
        return slow if images.takes_long(question) else short

    def replying(name: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
        async def reply(question: dict[str, Any], request: Request) -> dict[str, Any]:
            left = Event()
            LEFT.set(left)

            async def look() -> None:
                try:
                    while not await request.is_disconnected():
                        await anyio.sleep(LOOKS_EVERY)
                finally:  # also when the server ends
                    left.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(look)
                work = partial(told, partial(answer, question))
                reply = await anyio.to_thread.run_sync(work, limiter=queue(name, question))
                tasks.cancel_scope.cancel()
            return reply

        reply.__name__ = name  # JavaScript calls it by its name
        return reply

    return [
        replying("open_image", images.open_image),
        *(replying(answer.__name__, partial(images.ask, answer)) for answer in ANSWERS),
    ]


def told(answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """An answer, or one line that says what is wrong with the question."""
    try:
        return answer()
    except InputError as error:
        return {"error": str(error)}
    except VisitorLeft:
        return {}
