"""Safe file names, files that are never half-written, and hashes of files, cached between runs."""

import hashlib
import os
import re
import sqlite3
import sys
import time
import unicodedata
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from explainers.runtime.progress import progress

UMASK = os.umask(0)
os.umask(UMASK)  # the umask can only be read by setting it

SETTLED = 2.0
"""Age of a file, in seconds, above which its times reveal any later change. Hashes of younger files are not cached."""

ABANDONED = 3600.0
"""Time since the last change, in seconds, after which no process still writes an unfinished file."""

TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that turn the direction of text, so that gpj.exe may read exe.jpg."""


def printable(text: str) -> str:
    r"""Replace control characters, line ends, bytes that are not UTF-8, and characters that turn text, by �.

    >>> printable("a\tb.png"), printable("\u202egpj.exe")
    ('a�b.png', '�gpj.exe')
    """
    return "".join(
        "\ufffd" if each in TURNING or unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") else each for each in text
    )


def file_name(text: str, most: int = 200) -> str:
    """Make a file or folder name from any `text`; it is not hidden, and names nothing outside its folder.

    Characters that Windows refuses are replaced too. A name that was changed, or shortened to `most` bytes, ends in a
    hash of `text`, so that different texts get different names. File systems allow 255 bytes; `atomic` adds some.

    >>> file_name("DecompX-PLUS"), file_name("../../x")
    ('DecompX-PLUS', '_._.._x_9cdf6a50')
    >>> len(file_name("x" * 1000))
    200
    """
    name = re.sub(r'^\.|^$|[/\\<>:"|?*\ufffd]', "_", printable(text))
    if name == text and len(name.encode()) <= most:
        return name
    start = name.encode()[: most - 9].decode(errors="ignore")
    return f"{start}_{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]}"


@contextmanager
def atomic(path: str | Path, alone: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path`; the file written there replaces `path` if the block succeeds.

    A reader of `path` sees the old file or the whole new one, even if the process is killed. If the block fails, the
    temporary file is deleted, and an OSError that names no file, such as of a full disk, names `path`. What killed
    processes left in the folder is deleted too, see `delete_leftovers`.

    Args:
        path: the file to write.
        alone: if True, no other process may write this file at the same time, and the file that a killed process
            left is overwritten.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    delete_leftovers(path.parent.absolute())
    # The suffix stays, because libraries infer the format from it
    owner = "" if alone else f".{os.getpid()}"
    unfinished = path.with_name(f".{path.stem}{owner}.unfinished{path.suffix}")
    try:
        yield unfinished
        unfinished.chmod(0o666 & ~UMASK)  # safetensors lets only the owner read its files
        unfinished.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        unfinished.unlink(missing_ok=True)


@cache
def delete_leftovers(folder: Path) -> None:
    """Delete what killed processes left of `atomic` in a folder, after `ABANDONED` seconds; once a folder."""
    with os.scandir(folder) as entries:
        named = [entry for entry in entries if re.fullmatch(r"\..+\.\d+\.unfinished(\.\w+)?", entry.name)]
    for entry in named:
        with suppress(OSError):  # another process finished it, or deleted it
            if time.time() - entry.stat().st_mtime > ABANDONED:
                os.unlink(entry.path)


def is_first_process() -> bool:
    """Whether this process writes what all processes of a training share; Lightning, if it is loaded, numbers them."""
    lightning = sys.modules.get("lightning.pytorch.utilities.rank_zero")
    return lightning is None or lightning.rank_zero_only.rank == 0


def write_atomically(path: Path, text: str) -> None:
    """Write a text file in the first process; a concurrent reader sees the old text or the whole new one."""
    if is_first_process():
        with atomic(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")


def is_shared(folder: Path, strategy: Any) -> bool:
    """Whether all processes, connected by a strategy of Lightning, see what process 0 writes to a folder.

    Every process has to call this function. The folder is created if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    token = folder / strategy.broadcast(f".{uuid.uuid4().hex}")
    if strategy.is_global_zero:
        token.touch()
    strategy.barrier("token written")
    seen = token.exists()
    strategy.barrier("token looked for")
    if strategy.is_global_zero:
        token.unlink()
    return strategy.reduce_boolean_decision(seen)


def file_hashes(paths: Sequence[str | Path]) -> list[str]:
    """Compute the SHA-256 of the contents of files, in parallel.

    A database in the user's cache folder (`XDG_CACHE_HOME`) stores each hash with the path, size and times of its file.
    The hash is computed again only after one of these has changed.

    >>> file_hashes([__file__]) == [hashlib.sha256(Path(__file__).read_bytes()).hexdigest()]
    True
    """
    stamps = [_stamp(Path(path)) for path in paths]
    known = _read_hashes(stamps)
    new = [stamp for stamp in dict.fromkeys(stamps) if stamp not in known]
    hashes = {}
    with ThreadPoolExecutor() as threads, progress("hashing files", len(new), "file", delay=2) as bar:
        for stamp, value in zip(new, threads.map(_hash, [path for path, *_ in new]), strict=True):
            hashes[stamp] = value
            bar.update(1)
    _remember(hashes)
    known |= hashes
    return [known[stamp] for stamp in stamps]


Stamp = tuple[str, int, int, int]
"""A file's path, its size in bytes, and when its contents and its attributes last changed, in nanoseconds."""


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return os.path.abspath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _hash(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _memory() -> sqlite3.Connection:
    """Open the database of hashes; it is created if missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "transferable-explainers"
    cache.mkdir(parents=True, exist_ok=True)
    memory = sqlite3.connect(cache / "hashes.sqlite", timeout=10)
    memory.execute("CREATE TABLE IF NOT EXISTS hashes (path PRIMARY KEY, size, mtime, ctime, hash) WITHOUT ROWID")
    return memory


def _read_hashes(stamps: Sequence[Stamp]) -> dict[Stamp, str]:
    """Return the stored hashes of unchanged files; none if the cache folder is not writable."""
    keys = [printable(path) for path, *_ in stamps]
    try:
        with closing(_memory()) as memory:
            rows = [memory.execute("SELECT * FROM hashes WHERE path = ?", (key,)).fetchone() for key in keys]
    except (OSError, sqlite3.Error):
        return {}
    return {stamp: row[4] for stamp, row in zip(stamps, rows, strict=True) if row and row[1:4] == stamp[1:]}


def _remember(hashes: dict[Stamp, str]) -> None:
    """Store hashes, except of files that changed just now, whose next change may keep their size and times."""
    latest = time.time_ns() - int(SETTLED * 1e9)
    rows = [(printable(path), *of, value) for (path, *of), value in hashes.items() if max(of[1:]) < latest]
    try:
        with closing(_memory()) as memory, memory:
            memory.executemany("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?)", rows)
    except (OSError, sqlite3.Error):
        return
