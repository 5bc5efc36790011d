"""The page in Gradio: one component, drawn by this room's HTML, CSS and JavaScript, and the functions that it asks."""

import base64
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from explainers.app.choosing import passes_of
from explainers.app.page.answers import MOST_METHODS
from explainers.app.page.asking import EXAMPLE, LARGEST_FILE, Images, file_of_room, replies
from explainers.app.page.curves import COLOURS, GREY
from explainers.app.page.turns import MANY_PASSES
from explainers.app.page.visits import Visits
from explainers.app.session import Session
from explainers.errors import needs
from explainers.posthoc import build
from explainers.posthoc.names import built_for

HINT = "Drop an image, and see which parts support each class."
TEXT_HINT = "Drop an image, type a text, and see which parts support it."
SCRIPTS = ("canvas.js", "hiding.js", "alike.js", "texts.js", "choices.js", "page.js")
SUMS = ("AttnLRP-PLUS", "DecompX-PLUS", "DecompX-SkipPLUS")
"""Sums over layers that are offered where their method is."""

MOST_PASSES = 5000
"""Forward passes above which a method is left out."""

CLOSED = ("GRADIO_ANALYTICS_ENABLED", "GRADIO_RUN_HISTORY")
"""Environment variables of what Gradio does by default: it reports to its makers, and lends visitors who come by this
machine's own address the Hugging Face token of whoever started it, to store what they did."""


def import_gradio() -> Any:
    """Import Gradio, which takes seconds; an InputError if it is not installed."""
    os.environ.update(dict.fromkeys(CLOSED, "False"))
    needs("gradio", "app", "explainers serve")
    return import_module("gradio")


def build_page(session: Session) -> Any:
    """Build the page, a `gradio.Blocks`, for one model; see `serve`, which starts it."""
    gradio = import_gradio()
    if session.takes_texts:
        session.text_head.embed("a photo")  # loads the text tower
    explainers = other_methods(session)
    images = Images(session, explainers, Visits())
    name = session.target.name
    with gradio.Blocks(title=f"Explain {name}", analytics_enabled=False) as page:
        gradio.HTML(
            html_template=text_of("page.html"),
            css_template=text_of("page.css"),
            js_on_load="\n".join(map(text_of, SCRIPTS)),
            server_functions=replies(images),
            apply_default_css=False,
            heading=f"What does {name} see?",
            hint=TEXT_HINT if session.takes_texts else HINT,
            example=f"data:image/jpeg;base64,{base64.b64encode(file_of_room(EXAMPLE)).decode()}",
            largest=LARGEST_FILE,
            classes=list(session.names),
            methods=[session.method],
            explainers=noted({session.method: session.explainer, **explainers}),
            most=MOST_METHODS,
            colours=list(COLOURS),
            grey=GREY,
        )
    return page


def other_methods(session: Session) -> dict[str, Any]:
    """All methods that the session's model can have besides its own one, by their names."""
    target = session.target
    methods = built_for(target)
    methods |= {name: build(name, target, target.grid) for name in SUMS if name.partition("-")[0] in methods}
    others = sorted(methods.keys() - {session.method, "Chance"})
    return {name: methods[name] for name in others if passes_of(methods[name]) <= MOST_PASSES}


def noted(methods: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The methods as they are listed: name, and a note on slow ones."""
    return [
        (name, f"{passes_of(method)} passes" if passes_of(method) > MANY_PASSES else "")
        for name, method in sorted(methods.items())
    ]


def text_of(name: str) -> str:
    """A text file of this room."""
    return file_of_room(name).decode()
