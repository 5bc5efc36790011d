"""The layout of the page in Gradio: what is uploaded and chosen on the left, one component of our own on the right."""

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any

from explainers.app.page.answers import ANSWERS, MOST_METHODS, checked_methods, opened
from explainers.app.page.curves import COLOURS, GREY
from explainers.app.page.shown import Shown
from explainers.app.page.visits import Visits
from explainers.app.session import Session
from explainers.errors import InputError, needs
from explainers.posthoc import build
from explainers.posthoc.names import built_for

HINT = "Drop an image, and see which parts support each class."
TEXT_HINT = "Drop an image, type a text, and see which parts support it."
SCRIPTS = ("canvas.js", "hiding.js", "alike.js", "texts.js", "page.js")
SUMS = ("AttnLRP-PLUS", "DecompX-PLUS", "DecompX-SkipPLUS")
"""Sums over layers that are offered where their method is."""

MANY_PASSES, MOST_PASSES = 50, 5000
"""Forward passes above which the list names their number, and above which a method is left out."""


def build_page(session: Session) -> Any:
    """Build the page, a `gradio.Blocks`, for one model; see `serve`, which starts it."""
    needs("gradio", "app", "explainers serve")
    import gradio  # here, because it takes seconds

    if session.takes_texts:
        session.text_head.embed("a photo")  # loads the text tower
    visits = Visits()
    explainers = other_methods(session)
    methods = [session.method, *explainers]
    name = session.target.name
    answers = [served(answer, methods, visits) for answer in ANSWERS]
    with gradio.Blocks(title=f"Explain {name}", analytics_enabled=False, delete_cache=(600, 600)) as page:
        gradio.Markdown(f"### What does {name} see?\n{TEXT_HINT if session.takes_texts else HINT}")
        with gradio.Row():
            with gradio.Column(scale=1, min_width=250):
                photo = photo_input(gradio, "Image", 230)
                search = class_input(gradio, session.names)
                chosen = gradio.Dropdown(
                    [titled(method, explainers.get(method)) for method in methods],
                    value=methods[:1],
                    multiselect=True,
                    max_choices=MOST_METHODS,
                    label="Explainers side by side",
                    elem_id="methods",
                )
                other = photo_input(gradio, "Why is it like another image?", 230)
            with gradio.Column(scale=4, min_width=330):
                panel = own_component(gradio, answers, methods[:1])
        open_image = opening(session, explainers, visits)
        for field, show in ((photo, shows(gradio, open_image)), (other, shows(gradio, open_image, second=True))):
            field.input(show, field, [field, panel], show_progress="minimal")
        search.input(None, search, search, js=told("explainers-class", "null"))  # the field is empty again
        chosen.input(None, chosen, js=told("explainers-methods"))
    return page


def own_component(gradio: Any, answers: Sequence[Callable[..., Any]], methods: Sequence[str]) -> Any:
    """The part of the page that this room's HTML, CSS and JavaScript draw, and the functions that they call."""
    return gradio.HTML(
        value={},
        html_template=text_of("page.html"),
        css_template=text_of("page.css"),
        js_on_load="\n".join(map(text_of, SCRIPTS)),
        server_functions=answers,
        apply_default_css=False,
        methods=methods,
        colours=list(COLOURS),
        grey=GREY,
    )


def opening(session: Session, explainers: Mapping[str, Any], visits: Visits) -> Callable[[str | None], dict[str, Any]]:
    """A function that reads an uploaded file: what the browser needs to show it, or one line that says what is wrong.

    The arguments are those of `Shown` and `served`. Visitors compute one after the other.
    """
    computing = Lock()

    def open_image(path: str | None) -> dict[str, Any]:
        if path is None:
            return {}
        if not Path(path).is_file():  # a request that the page does not make could name the folder of all uploads
            return {"error": "expected an uploaded image, got none: drop it again"}
        try:
            shown = Shown(session, path, explainers, computing)
            return opened(shown) | {"key": visits.add(shown)}
        except InputError as error:
            return {"error": str(error).replace(path, Path(path).name)}  # nobody needs to know the server's folders

    return open_image


def shows(
    gradio: Any, open_image: Callable[[str | None], dict[str, Any]], second: bool = False
) -> Callable[[str | None], tuple[Any, dict[str, Any]]]:
    """A function of an uploaded file: what its field shows, empty if it cannot be read, and the value of the panel."""

    def show(path: str | None) -> tuple[Any, dict[str, Any]]:
        answer = open_image(path)
        return None if "error" in answer else gradio.skip(), {"other": answer} if second else answer

    return show


def served(
    answer: Callable[..., dict[str, Any]], methods: Sequence[str], visits: Visits
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Let browsers ask an answer about the image whose key they know.

    Args:
        answer: one of `ANSWERS`.
        methods: names of the methods that may be asked for.
        visits: the opened images.
    """

    def reply(question: dict[str, Any]) -> dict[str, Any]:
        try:
            checked_methods(question, methods)
            shown = visits.find(question.pop("key"))
            if "other" in question:
                question["other"] = visits.find(question["other"])
            return answer(shown, **question)
        except InputError as error:
            return {"error": str(error)}

    reply.__name__ = answer.__name__  # JavaScript calls it by its name
    return reply


def photo_input(gradio: Any, label: str, height: int) -> Any:
    """A field for an image whose file is read by `photos`, so that what is wrong with it is said in one line."""

    photo = gradio.Image(label=label, sources=["upload", "clipboard"], height=height, buttons=[])
    photo.preprocess = lambda payload: payload and payload.path  # not in a subclass, for which Gradio writes a file
    return photo


def class_input(gradio: Any, names: Sequence[str]) -> Any:
    """A field that finds a class by its name; hidden for a model without classes."""
    choices = [(name, index) for index, name in enumerate(names)]
    label = f"Search all {len(names)} classes"
    return gradio.Dropdown(choices, value=None, label=label, visible=bool(names), elem_id="search")


def other_methods(session: Session) -> dict[str, Any]:
    """All methods that the session's model can have besides its own one, by their names."""
    target = session.target
    methods = built_for(target)
    methods |= {name: build(name, target, target.grid) for name in SUMS if name.partition("-")[0] in methods}
    others = sorted(methods.keys() - {session.method, "Chance"})
    return {name: methods[name] for name in others if passes_of(methods[name]) <= MOST_PASSES}


def titled(name: str, method: Any) -> tuple[str, str]:
    """A method as it is listed, with its passes if they take long, and its name."""
    passes = passes_of(method)
    return (f"{name} ({passes} passes)" if passes > MANY_PASSES else name), name


def passes_of(method: Any) -> int:
    """Forward passes of the model for each image."""
    return getattr(method, "forward_passes", 1)


def told(event: str, returned: str = "[]") -> str:
    """JavaScript that tells the panel a new choice."""
    return f"(detail) => {{ dispatchEvent(new CustomEvent('{event}', {{ detail }})); return {returned}; }}"


def text_of(name: str) -> str:
    """A file of this room."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
