"""A lock for a model that threads share, also in processes that are forked meanwhile."""

import os
import threading
import warnings
import weakref
from typing import Any

import torch

PATIENCE = 5.0
"""Time that a fork waits for a thread that computes, in seconds."""

BUSY = "forked while a thread computes: the model of this process may be half changed; fork before, or use spawn"


class ModelLock:
    """A re-entrant lock, for `with`. Its copies are other locks.

    A forked process has none of its parent's other threads, so that what they hold is held for ever. A fork waits for
    them, because methods change the model for the time of a call; after `PATIENCE`, the new process gets a new lock,
    and a warning. It computes on one thread, because it has none of OpenMP's either.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _ALL.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return ModelLock, ()


_ALL: "weakref.WeakSet[ModelLock]" = weakref.WeakSet()
_HELD: dict[int, dict[ModelLock, bool]] = {}  # thread that forks → lock → whether it got it


def _hold_all() -> None:
    _HELD[threading.get_ident()] = {each: each._lock.acquire(timeout=PATIENCE) for each in list(_ALL)}


def _release_all() -> list[ModelLock]:
    """Release what this thread holds, and return the locks of others."""
    held = _HELD.pop(threading.get_ident())
    for each in held:
        if held[each]:
            each._lock.release()
    return [each for each in held if not held[each]]


def _renew_all() -> None:
    busy = _release_all()
    if _ALL:
        torch.set_num_threads(1)
    for each in busy:
        each._lock = threading.RLock()
    if busy:
        warnings.warn(BUSY, stacklevel=1)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_renew_all)
