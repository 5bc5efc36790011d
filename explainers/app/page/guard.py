"""What the server lets in: the requests of its own page, and none of other pages, whatever else Gradio would answer."""

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ROUTES = {
    "GET": r"/|/theme\.css|/favicon\.ico|/manifest\.json|/gradio_api/startup-events|/(assets|static)/.+",
    "HEAD": "/",
    "POST": "/gradio_api/component_server/",
}
"""All paths that are answered, for each method of HTTP, as a regular expression."""

AUDIT = "/audit"
"""Path of the page of an audit, where the server has one."""

LARGEST_BODY = 28 * 2**20
"""Size of a question, in bytes: a file of 20 MB in base64."""

MOST_BODIES = 64 * 2**20
"""Size of all questions that are in memory together, in bytes."""


class Guard:
    """ASGI middleware that answers the page's own requests, and refuses all others in one line.

    A page of another server can ask this one in the browser of somebody who reaches it. It is refused by the `Origin`
    that browsers send with its questions, or, if its own name leads here (DNS rebinding), by the `Host`.

    Args:
        host: address that the server listens on.
        domain: name under which browsers reach it, such as that of a proxy, besides IP addresses, `localhost` and the
            name of the machine; `None` for no other one, `*` for a public page, which answers the pages of others too.
        audit: the page of an audit, one HTML file that is sent at `AUDIT`; `None` for none.
    """

    def __init__(self, app: Any, host: str, domain: str | None = None, audit: Path | None = None) -> None:
        self.app = app
        self.audit = audit
        self._routes = ROUTES | ({"GET": f"{ROUTES['GET']}|{AUDIT}"} if audit else {})
        self.domain = domain and domain.lower()
        machine = socket.gethostname().lower()
        self._names = {"localhost", machine, f"{machine}.local", host.lower(), self.domain}
        self._held = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        from starlette.responses import FileResponse, PlainTextResponse  # with Gradio

        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is not None:
            status, text = refusal
            return await PlainTextResponse(text, status)(scope, receive, send)
        if self.audit and scope.get("path") == AUDIT:
            return await FileResponse(self.audit)(scope, receive, send)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            size = len(message.get("body", b""))
            received += size
            self._held += size
            if received > LARGEST_BODY or self._held > MOST_BODIES:
                raise OverflowError("the questions take too much memory")  # Gradio answers with 400
            return message

        try:
            await self.app(scope, counted, send)
        except KeyError as error:  # Gradio's, for the number of a component of another page
            if not isinstance(error.args[0], int):
                raise
            await PlainTextResponse("expected a question of this page: load it again", 400)(scope, receive, send)
        finally:
            self._held -= received

    def _refusal(self, scope: MutableMapping[str, Any]) -> tuple[int, str] | None:
        """The status and the line that refuse a request; `None` for one of the page."""
        if scope["type"] != "http" or not re.fullmatch(self._routes.get(scope["method"], "(?!)"), scope["path"]):
            return 404, "not found"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.domain != "*" and not self._is_own(host):
            return 403, f"expected a name of this server, got {host[:100]}: if it is one, serve --domain NAME"
        if self.domain != "*" and origin is not None and not self._is_same(origin, host):
            return 403, f"expected a question of this server's own page, got one of {origin[:100]}"
        if scope["method"] == "POST" and headers.get("content-type", "").partition(";")[0] != "application/json":
            return 415, "expected JSON"
        if int(headers.get("content-length", "0")) > LARGEST_BODY:
            return 413, "expected a smaller file"
        return None

    def _is_own(self, host: str) -> bool:
        """Whether a host can only be this server; nobody else can make an IP address lead here."""
        name = strip_port(host)
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True

    def _is_same(self, origin: str, host: str) -> bool:
        """Whether an origin is this server, also behind a proxy that hides the host that the browser asked for."""
        own = origin.lower().partition("://")[2]
        return own == host.lower() or strip_port(own) == self.domain


def strip_port(host: str) -> str:
    """The name or address in a host, without its port; nothing of what is no host.

    >>> strip_port("LOCALHOST:7860"), strip_port("[::1]:7860"), strip_port("10.0.0.1"), strip_port("[::1")
    ('localhost', '::1', '10.0.0.1', '')
    """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
