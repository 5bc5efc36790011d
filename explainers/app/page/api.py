"""The functions that browsers call: they open images, and ask the views about those that they have opened."""

import base64
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.resources import files
from threading import Event
from typing import Any, get_type_hints

from explainers.app.page.images import ImageStore, OpenedImage
from explainers.app.page.turns import LEFT, Turns, VisitorLeft, check_present
from explainers.app.page.views import VIEWS, check_methods, describe_image
from explainers.app.session import Session
from explainers.errors import InputError, fits
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

UPLOAD = {"name": (str, False), "data": (str, False)}
"""The form of a question of `open_image`, see `question_form`."""

OPENED_AT_ONCE, SHORT_AT_ONCE, SLOW_AT_ONCE = 1, 4, 2
"""Number of images that are decoded together, and of questions whose answers are computed in turns; the others wait."""

LOOKS_EVERY = 0.5
"""Time between two looks whether a visitor has left, in seconds."""


class Api:
    """Opens uploaded files, and answers questions about them; nothing is written to the disk."""

    def __init__(self, session: Session, explainers: Mapping[str, Any], store: ImageStore) -> None:
        self.session = session
        self.explainers = explainers
        self.store = store
        self.turns = Turns()

    def open_image(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Open a file, its `name` and its `data` in base64, or without them the example: what a browser draws of it."""
        if "data" in question:
            name = printable(str(question.get("name", ""))[-LONGEST_NAME:])
            data = _decode_upload(name, question["data"])
        else:
            name, data = EXAMPLE, read_page_file(EXAMPLE)
        key = self.store.make_key(name, data)
        image = self.store.get(key)
        if image is None:
            check_present()
            decoded = decode_upload(name, data, MOST_PIXELS)
            image = self.store.add(key, OpenedImage(self.session, decoded, name, self.explainers, self.turns))
        return describe_image(image) | {"key": key}

    def ask(self, view: Callable[..., dict[str, Any]], question: dict[str, Any]) -> dict[str, Any]:
        """One of the `VIEWS` of the image whose key a browser knows."""
        check_methods(question, [*self.explainers, self.session.method])
        image = self.store.find(question.pop("key", ""))
        if "other" in question:
            question["other"] = self.store.find(question["other"])
        try:
            return view(image, **question)
        finally:
            self.store.trim()

    def takes_long(self, question: Mapping[str, Any]) -> bool:
        """Whether a slow method has to compute the answer; False for a question that will be refused."""
        methods = [question["method"]] if "method" in question else question.get("methods", [])
        try:
            image = self.store.find(question.get("key", ""))
            index = image.parse_index(question.get("index"), question.get("against", ()))
        except InputError:
            return False
        return any(image.takes_long(method, index) for method in methods if method in image.explainers)


def read_page_file(name: str) -> bytes:
    """The bytes of a file of this room."""
    return files(__package__).joinpath(name).read_bytes()


def question_form(view: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """What a question for a view has: name → type, and whether it is needed. Images are given by their keys."""
    hints = get_type_hints(view)
    return {
        "key" if name == "image" else name: (
            str if hints[name] is OpenedImage else hints[name],
            parameter.default is parameter.empty,
        )
        for name, parameter in inspect.signature(view).parameters.items()
    }


def check_question(question: Any, form: Mapping[str, tuple[Any, bool]]) -> None:
    """Raise an InputError unless a question is an object of a `question_form`."""
    if not isinstance(question, dict):
        raise InputError(f"expected a question as an object, got {question!s:.60}")
    asked = [*question, *(name for name, (_, needed) in form.items() if needed)]
    for name in asked:
        if name not in form or not fits(question.get(name), form[name][0]):
            got = f"{question.get(name)!s:.60} as {name:.60}"
            raise InputError(f"expected {', '.join(form)}, each of its type, got {got}")


def _decode_upload(name: str, data: str) -> bytes:
    """The bytes of an uploaded file; an InputError if it is too large or no base64."""
    if len(data) > LARGEST_FILE * 4 // 3 + 4:
        raise InputError(
            f"{name}: expected a file of at most {LARGEST_FILE >> 20} MB, got a larger one: make it smaller"
        )
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise InputError(f"{name}: expected an image, got {error}: drop it again") from error


def server_functions(api: Api) -> list[Callable[..., Awaitable[dict[str, Any]]]]:
    """The functions that browsers call, by the names of the views, and `open_image`.

    Uploads, short and slow questions wait in three queues, without threads. What visitors asked before they left is not
    computed. A question of another form is answered with 400.
    """
    import anyio
    from gradio import Request
    from starlette.exceptions import HTTPException

    opening, short, slow = map(anyio.CapacityLimiter, (OPENED_AT_ONCE, SHORT_AT_ONCE, SLOW_AT_ONCE))

    def queue(name: str, question: dict[str, Any]) -> Any:
        if name == "open_image":
            return opening
        return slow if api.takes_long(question) else short

    def serve(name: str, answer: Callable[[dict[str, Any]], dict[str, Any]], form: dict[str, tuple[Any, bool]]) -> Any:
        async def reply(question: dict[str, Any], request: Request) -> dict[str, Any]:
            try:
                check_question(question, form)
            except InputError as error:  # not of this page's script
                raise HTTPException(400, printable(str(error))) from error
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
                reply = await anyio.to_thread.run_sync(_answer, answer, question, limiter=queue(name, question))
                tasks.cancel_scope.cancel()
            return reply

        reply.__name__ = name  # JavaScript calls it by its name
        return reply

    views = (serve(view.__name__, partial(api.ask, view), question_form(view)) for view in VIEWS)
    return [serve("open_image", api.open_image, UPLOAD), *views]


def _answer(answer: Callable[[dict[str, Any]], dict[str, Any]], question: dict[str, Any]) -> dict[str, Any]:
    """An answer, or one line that says what is wrong with the question."""
    try:
        return answer(question)
    except InputError as error:
        return {"error": printable(str(error))}
    except VisitorLeft:
        return {}
