"""Forward passes of an explainer: how many, how long they take, and another number of them."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from explainers.app.choosing import choose, passes_of
from explainers.app.method_names import parse_methods
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.models.removal import check_removal
from explainers.posthoc import method_names
from explainers.posthoc.names import labelled, passes_option
from explainers.refinement.coalitions import check_passes

MANY = 200
"""Forward passes of one heatmap above which they are announced."""

TRIED = 16
"""Number of images whose forward pass is timed."""


def set_passes(sessions: Sequence[Session], passes: int) -> None:
    """Give explainers another number of forward passes: methods that choose one, and AnyHead, which they refine.

    Raises:
        InputError: if none of the explainers has such a number, or it does not allow this one.
    """
    changed = [_set_passes(session, passes) for session in sessions]
    if not any(changed):
        having = [name for name in method_names() if passes_option(name)]
        raise InputError(
            f"expected --passes with AnyHead, or one of {', '.join(having)}, got"
            f" {', '.join(session.method for session in sessions)}: leave out --passes"
        )


def _set_passes(session: Session, passes: int) -> bool:
    """Change the explainer of a session, and its label; False if it has no number of passes."""
    explainer: Any = session.explainer
    removal = getattr(explainer, "refine_removal", None)
    if removal is not None:
        check_passes(**{"--passes": passes})
        check_removal(session.target, removal)
        explainer.refine = passes
        explainer.forward_passes = 1 + passes
        session.method = f"{session.method}(refine={passes})"
        return True
    ((name, options),) = labelled(parse_methods(session.method)).values()
    option = passes_option(name) if name.partition("-")[0].removeprefix("Libra") in method_names() else None
    if option is not None:
        session.explainer, session.method = choose(session.target, {name: {**options, option: passes}})
    return option is not None


def announce_passes(sessions: Sequence[Session], pictures: int) -> None:
    """Print how many passes a heatmap takes, and about how long that is, for each explainer with `MANY` passes.

    Args:
        sessions: the explainers, of one model.
        pictures: number of heatmaps of each explainer.
    """
    slow = [session for session in sessions if passes_of(session.explainer) > MANY]
    seconds = _seconds_per_pass(slow[0]) if slow else 0
    several = f"{pictures} picture{'s' * (pictures > 1)}"
    for session in slow:
        passes = passes_of(session.explainer)
        duration = passes * pictures * seconds
        about = f"{duration / 60:.0f} min" if duration > 90 else f"{duration:.0f} s"
        name = session.method.partition("(")[0]
        advice = "; --passes N sets their number" if name in method_names() and passes_option(name) else ""
        line = f"{session.method}: {passes} forward passes for each picture, about {about} for {several}{advice}"
        print(line, file=sys.stderr, flush=True)


@torch.no_grad()
def _seconds_per_pass(session: Session) -> float:
    """The time of a forward pass in a batch, of which the first is not timed."""
    side, device = session.target.grid.image_size, session.target.mean.device
    grey = torch.full((TRIED, 3, side, side), 128, dtype=torch.uint8, device=device)
    session.target(grey)
    start = time.perf_counter()
    session.target(grey).sum().item()  # which waits for the device
    return (time.perf_counter() - start) / TRIED
