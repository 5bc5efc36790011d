"""The caller's hooks in a copy of a model: those that change no outputs are taken off, and a line names the others."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules

from explainers.errors import InputError
from explainers.models.model import TargetModel
from explainers.models.probes import TOLERANCE, compare_outputs, draw_probes
from explainers.saved.identity import is_added


def settle_hooks(target: TargetModel) -> None:
    """Take hooks that change no outputs off a target; a line says which stay, and run on every pass.

    Raises:
        InputError: if hooks of all modules, of which a target has others than the caller's model, change the outputs.
    """
    for part in target.modules():
        part._backward_hooks.clear()
        part._backward_pre_hooks.clear()
    everywhere = [modules._global_forward_hooks, modules._global_forward_pre_hooks]
    if any(everywhere):
        if _differs(target, everywhere):
            raise InputError(
                f"expected {target.name} without hooks of all modules (torch.nn.modules.module) that change outputs:"
                " remove them, or register them on the model"
            )
        print(f"{target.name}: hooks of all modules run on every pass", file=sys.stderr, flush=True)
    of_parts = [held for part in target.modules() for held in (part._forward_hooks, part._forward_pre_hooks)]
    of_parts = [held for held in of_parts if any(map(is_added, held.values()))]
    if not of_parts:
        return
    if not _differs(target, of_parts):
        for held in of_parts:
            _take_off(held)
        return
    print(f"{target.name}: its hooks change its outputs; they stay, and run on every pass", file=sys.stderr, flush=True)


def _take_off(held: Any) -> None:
    for key in [key for key, hook in held.items() if is_added(hook)]:
        del held[key]


@contextmanager
def _without(hooks: list[Any]) -> Iterator[None]:
    """Take the caller's hooks off inside of this context."""
    saved = [dict(held) for held in hooks]
    try:
        for held in hooks:
            _take_off(held)
        yield
    finally:
        for held, before in zip(hooks, saved, strict=True):
            held.clear()
            held.update(before)


@torch.no_grad()
def _differs(target: TargetModel, hooks: list[Any]) -> bool:
    """Whether the outputs for probe images are others without hooks."""
    images = draw_probes(target.channels, target.grid.size, target.mean)
    expected: Tensor = target.outputs(images)
    try:
        with _without(hooks):
            return not compare_outputs(target.outputs(images), expected) < TOLERANCE
    except Exception:  # what follows needs what a hook returns
        return True
