"""Who may use the model: one computation at a time, short ones first, and none of visitors who have left."""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Condition, Event
from typing import Any

from torch import nn

from explainers.app.choosing import estimate_passes

MANY_PASSES = 10
"""Forward passes above which a method is slow: it gives way to others while it computes."""

LEFT: ContextVar[Event | None] = ContextVar("left", default=None)
"""Set while a question is answered: whether the visitor who asked it has left."""


class VisitorLeft(Exception):
    """Ends a computation that nobody waits for any more."""


class Turns:
    """Gives one thread at a time the model. Slow computations give way to all that wait, and take turns."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._taken = False
        self._closed = False
        self._short: deque[object] = deque()
        self._slow: deque[object] = deque()

    def close(self) -> None:
        """Give nobody the model any more, and wait until whoever has it gives it back.

        A slow computation gives way before the next module; Python would abort if it ended while PyTorch computes.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._taken)

    @contextmanager
    def turn(self, slow: bool = False) -> Iterator[None]:
        """Hold the model; a VisitorLeft is raised if nobody waits for the answer."""
        self._take(self._slow if slow else self._short)
        try:
            check_present()
            yield
        finally:
            self._end()

    @contextmanager
    def take_turn(self, explainer: Any, target: nn.Module) -> Iterator[Any]:
        """Hold the model, and yield what to call: an explainer, or for a slow one its copy, which gives way.

        Methods change modules of the model while they compute. A copy has its own modules, so that it can wait between
        any two of them while others use the model; it shares the weights.
        """
        if estimate_passes(explainer) <= MANY_PASSES:
            with self.turn():
                yield explainer
            return
        with self.turn():
            tensors = {id(tensor): tensor for tensor in [*target.parameters(), *target.buffers()]}
            own_target, own = copy.deepcopy((target, explainer), tensors)
        for module in own_target.modules():
            module.register_forward_pre_hook(lambda *_: self._give_way())
        with self.turn(slow=True):
            yield own

    def _give_way(self) -> None:
        with self._changed:
            waiting = self._short or self._slow
        if waiting or self._closed:
            self._end()
            self._take(self._slow)
        check_present()

    def _take(self, queue: deque[object]) -> None:
        place = object()
        with self._changed:
            queue.append(place)
            self._changed.wait_for(
                lambda: self._closed or (not self._taken and (self._short or self._slow)[0] is place)
            )
            queue.remove(place)
            if self._closed:
                raise VisitorLeft
            self._taken = True

    def _end(self) -> None:
        with self._changed:
            self._taken = False
            self._changed.notify_all()


def check_present() -> None:
    """Raise a VisitorLeft if the visitor whose question is answered has left."""
    left = LEFT.get()
    if left is not None and left.is_set():
        raise VisitorLeft
