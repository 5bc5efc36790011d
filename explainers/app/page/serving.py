"""The page in Gradio: one component, drawn by this room's HTML, CSS and JavaScript, and the functions that it asks."""

import base64
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

from explainers.app.choosing import estimate_passes
from explainers.app.page.api import EXAMPLE, LARGEST_FILE, Api, read_page_file, server_functions
from explainers.app.page.guard import AUDIT, Guard
from explainers.app.page.images import ImageStore
from explainers.app.page.turns import MANY_PASSES, Turns
from explainers.app.page.views import COLOURS, GREY, MOST_METHODS
from explainers.app.session import Session
from explainers.errors import InputError, check_range, needs
from explainers.posthoc import build
from explainers.posthoc.names import build_supported
from explainers.report.audit_page import PAGE, load_audit
from explainers.text import TextHead

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

FRAME = f"""<iframe src=".{AUDIT}" title="The audit" sandbox="allow-scripts allow-downloads" allow="clipboard-write"
 style="width: calc(100% + 4rem); height: calc(100vh - 7rem); margin: 0 -2rem; border: 0"></iframe>"""

EVERYWHERE = ("0.0.0.0", "::")
FONTS: dict[str, Any] = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
"""Fonts of the system: Gradio's own ones are loaded from Google."""


def import_gradio() -> Any:
    """Import Gradio, which takes seconds; an InputError if it is not installed."""
    os.environ.update(dict.fromkeys(CLOSED, "False"))
    needs("gradio", "app", "explainers serve")
    return import_module("gradio")


def serve(
    model: Any,
    method: Any = "auto",
    host: str = "127.0.0.1",
    port: int = 7860,
    open_browser: bool = False,
    block: bool = True,
    text_head: TextHead | None = None,
    domain: str | None = None,
    audit: Path | None = None,
) -> Any:
    """Serve the page until Ctrl-C. `model`, `method` and `text_head` are those of `Session`.

    Args:
        host: address to listen on. The default accepts connections from this machine alone, 0.0.0.0 from all.
        port: port to listen on.
        open_browser: open the page in the browser.
        block: wait for Ctrl-C; otherwise return the running `gradio.Blocks`, which has `close`.
        domain: name under which browsers reach the page, see `Guard`; `*` for a public page.
        audit: folder of an audit, whose page a second tab shows; `None` for no such tab.

    Raises:
        InputError: if Gradio is not installed, the model takes no photos, the folder has no audit, or address or port
            cannot be used.
    """
    check_range(1, 65535, port=port)
    gradio = import_gradio()
    from starlette.middleware import Middleware  # with Gradio

    report = audit and audit / PAGE
    if audit:
        load_audit(audit)
    page = build_page(Session(model, method, text_head), tab=bool(report))
    try:
        page.launch(
            server_name=host,
            server_port=port,
            share=False,
            inbrowser=open_browser,
            prevent_thread_lock=True,
            quiet=True,
            state_session_capacity=100,
            footer_links=[],
            ssr_mode=False,
            pwa=False,
            enable_monitoring=False,
            run_history=False,
            mcp_server=False,
            app_kwargs={"middleware": [Middleware(Guard, host, domain, report)]},
            theme=gradio.themes.Default(**FONTS),
        )
    except OSError as error:
        raise InputError(
            f"expected a free port of this machine, got {host}:{port}, which cannot be opened: stop the program that"
            " uses it, or choose another port, such as --port 7861"
        ) from error
    print(f"The page is at {page.local_url} (Ctrl-C stops it)", flush=True)
    if host in EVERYWHERE:
        print("Every machine that reaches this one can open it: there is no password.", flush=True)
    if block:
        with suppress(KeyboardInterrupt):
            Event().wait()
        page.turns.close()
        page.server.config.timeout_graceful_shutdown = 1  # for visitors who still send something, in seconds
        page.close(verbose=False)
    return page


def build_page(session: Session, tab: bool = False) -> Any:
    """Build the page, a `gradio.Blocks`, for one model of photos; with `tab` also that of an audit, see `serve`."""
    gradio = import_gradio()
    if session.target.channels not in (1, 3):
        raise InputError(
            f"expected a model of photos, of 1 or 3 channels, got {session.target.channels} of {session.target.name}:"
            " explain its arrays with `explainers explain`"
        )
    if session.takes_texts:
        session.text_head.embed("a photo")  # loads the text tower
    with gradio.Blocks(title=f"Explain {session.target.name}", analytics_enabled=False) as page:
        if not tab:
            page.turns = _add_explaining(gradio, session)
            return page
        with gradio.Tab("Explain"):
            page.turns = _add_explaining(gradio, session)
        with gradio.Tab("Audit"):
            gradio.HTML(FRAME, padding=False)
    return page


def _add_explaining(gradio: Any, session: Session) -> Turns:
    """Add the page that explains images to what is built; return who may use its model."""
    explainers = other_methods(session)
    api = Api(session, explainers, ImageStore())
    gradio.HTML(
        html_template=read_page_text("page.html"),
        css_template=read_page_text("page.css"),
        js_on_load="\n".join(map(read_page_text, SCRIPTS)),
        server_functions=server_functions(api),
        apply_default_css=False,
        heading=f"What does {session.target.name} see?",
        hint=TEXT_HINT if session.takes_texts else HINT,
        example=f"data:image/jpeg;base64,{base64.b64encode(read_page_file(EXAMPLE)).decode()}",
        largest=LARGEST_FILE,
        classes=list(session.names),
        methods=[session.method],
        explainers=list_methods({session.method: session.explainer, **explainers}),
        most=MOST_METHODS,
        colours=list(COLOURS),
        grey=GREY,
    )
    return api.turns


def other_methods(session: Session) -> dict[str, Any]:
    """All methods that the session's model can have besides its own one, by their names."""
    target = session.target
    methods = build_supported(target)
    methods |= {name: build(name, target, target.grid) for name in SUMS if name.partition("-")[0] in methods}
    others = sorted(methods.keys() - {session.method, "Chance"})
    return {name: methods[name] for name in others if estimate_passes(methods[name]) <= MOST_PASSES}


def list_methods(methods: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The methods as they are listed: name, and a note on slow ones."""
    return [
        (name, f"{estimate_passes(method)} passes" if estimate_passes(method) > MANY_PASSES else "")
        for name, method in sorted(methods.items())
    ]


def read_page_text(name: str) -> str:
    """A text file of this room."""
    return read_page_file(name).decode()
