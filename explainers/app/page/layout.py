"""The layout of the page in Gradio."""

from typing import Any


def build_page(session: Any) -> Any:
    """Build the page, a `gradio.Blocks`, for one model; see `serve`, which starts it."""
    raise NotImplementedError
