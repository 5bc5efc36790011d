"""Batches of loader processes, which send them in shared memory."""

import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

from explainers.errors import InputError

T = TypeVar("T")


def deliver_batches(batches: Iterable[T], num_workers: int) -> Iterator[T]:
    """Yield the batches of a loader of `num_workers` processes; an InputError if the shared memory is full."""
    try:
        yield from batches
    except RuntimeError as error:
        if not re.search("</torch_|shared memory|Bus error", str(error)):
            raise
        raise InputError(
            f"num_workers={num_workers}: expected shared memory for the batches of the loader processes, got a full"
            " /dev/shm (64 MB in a container of Docker): start it with docker run --shm-size=8g, or set num_workers=0"
        ) from error
