"""A page in the browser that explains images: `explainers serve`, and the same page as a Hugging Face Space."""

from explainers.app.page.layout import build_page
from explainers.app.page.serving import serve

__all__ = ["build_page", "serve"]
