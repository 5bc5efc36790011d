"""Hashes that identify a data set by the contents of its samples."""

import hashlib
import json
from typing import Any


def digest(*parts: Any) -> str:
    """Compute the SHA-256 of the parts in order: bytes, or JSON-serialisable values.

    >>> digest(b"ab", [1, 2]) == digest(b"ab", (1, 2)), digest(b"ab") == digest(b"a", b"b")
    (True, False)
    """
    hashed = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else json.dumps(part).encode()
        hashed.update(f"{len(content)}:".encode())
        hashed.update(content)
    return hashed.hexdigest()
