"""Starts the page."""

from pathlib import Path
from typing import Any

from explainers.app.page.guard import Guard
from explainers.app.page.layout import build_page, import_gradio
from explainers.app.session import Session
from explainers.errors import InputError, check_range
from explainers.text import TextHead

EVERYWHERE = ("0.0.0.0", "::")
FONTS: dict[str, Any] = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
"""Fonts of the system: Gradio's own ones are loaded from Google."""


def serve(
    model: Any,
    weights: str | Path | None = None,
    method: Any = "auto",
    host: str = "127.0.0.1",
    port: int = 7860,
    device: str | None = None,
    open_browser: bool = False,
    block: bool = True,
    text_head: TextHead | None = None,
    domain: str | None = None,
) -> Any:
    """Serve the page until Ctrl-C.

    Args:
        model: the model to explain, see `Session`.
        weights: file of the model's weights; `None` for those of timm.
        method: the explainer that the page starts with, see `Session`.
        host: address to listen on. The default accepts connections from this machine alone, 0.0.0.0 from all.
        port: port to listen on.
        device: where to compute, see `Session`.
        open_browser: open the page in the browser.
        block: wait for Ctrl-C; otherwise return the running `gradio.Blocks`, which has `close`.
        text_head: explains texts that visitors type, see `Session`; image towers of CLIP and SigLIP need none.
        domain: name under which browsers reach the page, see `Guard`; `*` for a public page.

    Raises:
        InputError: if Gradio is not installed, or the address or the port cannot be used.
    """
    check_range(1, 65535, port=port)
    gradio = import_gradio()
    from starlette.middleware import Middleware  # with Gradio

    page = build_page(Session(model, method, weights, device, text_head))
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
            app_kwargs={"middleware": [Middleware(Guard, host, domain)]},
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
        page.block_thread()
    return page
