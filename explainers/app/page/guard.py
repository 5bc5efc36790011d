"""What the server lets in: the requests of its own page, and none of other pages."""

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class Guard:
    """ASGI middleware that refuses the requests of other pages, in one line.

    A page of another server can ask this one in the browser of somebody who reaches it. It is refused by the `Origin`
    that browsers send with its questions, or, if its own name leads here (DNS rebinding), by the `Host`.

    Args:
        app: what answers the requests of its own page.
        host: address that the server listens on.
        domain: name under which browsers reach it, such as that of a proxy, besides IP addresses, `localhost` and the
            name of the machine; `None` for no other one, `*` for a public page, which answers the pages of others too.
    """

    def __init__(self, app: ASGIApp, host: str, domain: str | None = None) -> None:
        self.app = app
        self.domain = domain and domain.lower()
        machine = socket.gethostname().lower()
        self._names = {"localhost", machine, f"{machine}.local", host.lower(), self.domain}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        refusal = self.refuse(Headers(scope=scope))
        answer = self.app if refusal is None else PlainTextResponse(refusal, 403)
        await answer(scope, receive, send)

    def refuse(self, headers: Mapping[str, str]) -> str | None:
        """The line that refuses a request; `None` for one of the page."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.domain == "*":
            return None
        if not self._is_own(host):
            return f"expected a name of this server, got {host[:100]}: if it is one, serve --domain NAME"
        if origin is not None and not self._is_same(origin, host):
            return f"expected a question of this server's own page, got one of {origin[:100]}"
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
