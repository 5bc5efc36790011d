"""A page in the browser that explains images: `explainers serve`."""

from explainers.app.page.serving import build_page, serve

__all__ = ["build_page", "serve"]
