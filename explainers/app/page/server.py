"""The server of the page: a Starlette app of static files and one function that browsers ask, served by uvicorn."""

import json
import socket
import webbrowser
from collections.abc import Mapping
from contextlib import closing, suppress
from html import escape
from pathlib import Path
from string import Template
from threading import Event, Thread
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import FileResponse, HTMLResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from explainers.app.choosing import estimate_passes
from explainers.app.page.api import LARGEST_FILE, Api, read_file
from explainers.app.page.guard import Guard
from explainers.app.page.images import MANY_PASSES
from explainers.app.page.views import COLOURS, GREY, MOST_METHODS
from explainers.app.session import Session
from explainers.errors import InputError, check_range
from explainers.posthoc import build
from explainers.posthoc.names import build_supported
from explainers.report.audit_page import PAGE, load_audit

HINT = "Drop an image, and see which parts support each class."
TEXT_HINT = "Drop an image, type a text, and see which parts support it."
SUMS = ("AttnLRP-PLUS", "DecompX-PLUS", "DecompX-SkipPLUS")
"""Sums over layers that are offered where their method is."""

MOST_PASSES = 5000
"""Forward passes above which a method is left out."""

MOST_CONNECTIONS = 200
"""Number of connections and of questions above which others are answered with 503."""

EVERYWHERE = {"0.0.0.0": "localhost", "::": "localhost"}
"""Addresses of all interfaces → the name under which this machine reaches them."""


class RunningPage:
    """The app of `build_app`, which a thread serves until it is closed; see `serve`.

    Attributes:
        url: where this machine's browsers find the page.
    """

    def __init__(self, app: Starlette, host: str = "127.0.0.1", port: int = 0, domain: str | None = None) -> None:
        self._api: Api = app.state.api
        listening = listen(host, port)
        name = EVERYWHERE.get(host, f"[{host}]" if ":" in host else host)
        self.url = f"http://{name}:{listening.getsockname()[1]}/"
        config = uvicorn.Config(
            Guard(app, host, domain),
            lifespan="off",
            ws="none",
            log_level="error",
            limit_concurrency=MOST_CONNECTIONS,
        )
        self._server = uvicorn.Server(config)
        self._thread = Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server, and what it computes, see `Api.close`."""
        self._api.close()
        self._server.should_exit = self._server.force_exit = True  # without waiting for who still sends something
        self._thread.join()


def serve(
    session: Session,
    host: str = "127.0.0.1",
    port: int = 7860,
    open_browser: bool = False,
    domain: str | None = None,
    audit: Path | None = None,
) -> None:
    """Serve the page for one model of photos until Ctrl-C.

    Args:
        session: the model, and the explainer that the page begins with.
        host: address to listen on. The default accepts connections from this machine alone, 0.0.0.0 from all.
        port: port to listen on; 0 for a free one.
        open_browser: open the page in the browser.
        domain: name under which browsers reach the page, see `Guard`; `*` for a public page.
        audit: folder of an audit, whose page a second tab shows; `None` for no such tab.

    Raises:
        InputError: if the model takes no photos, the folder has no audit, or address or port cannot be used.
    """
    with closing(RunningPage(build_app(session, audit), host, port, domain)) as page, suppress(KeyboardInterrupt):
        print(f"The page is at {page.url} (Ctrl-C stops it)", flush=True)
        if host in EVERYWHERE:
            print("Every machine that reaches this one can open it: there is no password.", flush=True)
        if open_browser:
            webbrowser.open(page.url)
        Event().wait()


def build_app(session: Session, audit: Path | None = None) -> Starlette:
    """Build the page as an app that others can mount; it lets in whom their server lets in. See `serve`."""
    if session.target.channels not in (1, 3):
        raise InputError(
            f"expected a model of photos, of 1 or 3 channels, got {session.target.channels} of {session.target.name}:"
            " explain its arrays with `explainers explain`"
        )
    if session.takes_texts:
        session.text_head.embed("a photo")  # loads the text tower
    methods = other_methods(session)
    api = Api(session, methods)
    page = HTMLResponse(write_page(session, methods, bool(audit)))
    routes = [
        Route("/", page, methods=["GET"]),
        Route("/api", api.reply, methods=["POST"]),
        Mount("/static", StaticFiles(packages=[(__package__, "static")])),
    ]
    if audit:
        load_audit(audit)
        routes.append(Route("/audit", lambda _: FileResponse(audit / PAGE)))
    app = Starlette(routes=routes)
    app.state.api = api
    return app


def listen(host: str, port: int) -> socket.socket:
    """Open a port; an InputError if it is in use, or the address is none of this machine."""
    check_range(0, 65535, port=port)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InputError(
            f"expected a free port of this machine, got {host}:{port}, which cannot be opened: stop the program that"
            " uses it, or choose another port, such as --port 7861"
        ) from error


def write_page(session: Session, methods: Mapping[str, Any], tab: bool) -> str:
    """Write the page as HTML, with what its script reads; with `tab` also that of an audit."""
    data = {
        "largest": LARGEST_FILE,
        "classes": list(session.names),
        "methods": [session.method],
        "explainers": list_methods({session.method: session.explainer, **methods}),
        "most": MOST_METHODS,
        "colours": list(COLOURS),
        "grey": GREY,
    }
    return Template(read_file("page.html").decode()).substitute(
        model=escape(session.target.name),
        hint=TEXT_HINT if session.takes_texts else HINT,
        tabs="" if tab else "hidden",
        data=json.dumps(data).replace("<", "\\u003c"),  # names could end the element that holds the data
    )


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
