"""What each visitor looks at: nobody reads another one's image."""

import secrets
from collections import OrderedDict
from threading import Lock

from explainers.app.page.shown import Shown
from explainers.errors import InputError

LIMIT = 50
"""Number of images in memory; the least recently used one is dropped."""


class Visits:
    """The opened images, each under a random key that only the browser that opened it knows.

    Args:
        limit: maximum number of images.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._shown: OrderedDict[str, Shown] = OrderedDict()
        self._lock = Lock()

    def add(self, shown: Shown) -> str:
        """Keep an image, and return its key."""
        key = secrets.token_urlsafe(16)
        with self._lock:
            self._shown[key] = shown
            while len(self._shown) > self.limit:
                self._shown.popitem(last=False)
        return key

    def find(self, key: str) -> Shown:
        """Return the image with this key; an InputError if it was forgotten."""
        with self._lock:
            if key not in self._shown:
                raise InputError("expected an opened image, got one that the server has forgotten: drop it again")
            self._shown.move_to_end(key)
            return self._shown[key]
