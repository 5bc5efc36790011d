"""Starts the page."""

from pathlib import Path
from typing import Any


def serve(
    model: Any,
    weights: str | Path | None = None,
    method: Any = "auto",
    host: str = "127.0.0.1",
    port: int = 7860,
    device: str | None = None,
    open_browser: bool = False,
) -> None:
    """Serve the page until Ctrl-C.

    Args:
        model: the model to explain, see `Session`.
        weights: file of the model's weights; `None` for those of timm.
        method: the explainer that the page starts with, see `Session`.
        host: address to listen on. The default accepts connections from this machine alone, 0.0.0.0 from all.
        port: port to listen on.
        device: where to compute, see `Session`.
        open_browser: open the page in the browser.

    Raises:
        InputError: if Gradio is not installed, or the port is in use.
    """
    raise NotImplementedError
