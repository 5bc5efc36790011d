"""What each visitor looks at: nobody reads another one's image."""

import hashlib
import hmac
import secrets
from collections import OrderedDict
from threading import Lock

from explainers.app.page.shown import Shown
from explainers.errors import InputError

BUDGET = 128 * 2**20
"""Memory of the opened images, in bytes; the least recently used ones are dropped."""


class Visits:
    """The opened images, each under a key that only a browser which has the file can know.

    Args:
        budget: memory of the images, in bytes. The last one is kept, whatever its size.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.budget = budget
        self._secret = secrets.token_bytes(32)
        self._shown: OrderedDict[str, Shown] = OrderedDict()
        self._lock = Lock()

    def key_of(self, name: str, data: bytes) -> str:
        """The key of an uploaded file, by its name and bytes: who opens it again finds it."""
        return hmac.new(self._secret, name.encode() + b"\0" + data, hashlib.sha256).hexdigest()

    def add(self, key: str, shown: Shown) -> Shown:
        """Keep an image, and return it, or the one that has this key already."""
        with self._lock:
            shown = self._shown.setdefault(key, shown)
            self._shown.move_to_end(key)
        self.trim()
        return shown

    def get(self, key: str) -> Shown | None:
        """Return the image with this key; `None` if it was forgotten."""
        with self._lock:
            if key in self._shown:
                self._shown.move_to_end(key)
            return self._shown.get(key)

    def find(self, key: str) -> Shown:
        """Return the image with this key; an InputError if it was forgotten."""
        shown = self.get(key)
        if shown is None:
            raise InputError("expected an opened image, got one that the server has forgotten: drop it again")
        return shown

    def trim(self) -> None:
        """Drop the least recently used images beyond the budget: they grow while they are explained."""
        with self._lock:
            sizes = {key: shown.size for key, shown in self._shown.items()}
            total = sum(sizes.values())
            for key in list(sizes)[:-1]:
                if total > self.budget:
                    total -= sizes[key]
                    del self._shown[key]
