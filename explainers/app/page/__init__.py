"""A page in the browser that explains images: `explainers serve`."""

from explainers.errors import needs

needs("starlette", "app", "explainers serve")
needs("uvicorn", "app", "explainers serve")

from explainers.app.page.server import build_app, serve  # noqa: E402

__all__ = ["build_app", "serve"]
