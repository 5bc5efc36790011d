"""How suspicious a group of evidence is, and why."""

import math
from dataclasses import dataclass

from explainers.auditing.audit import Effect, Group

TOLD = {"aside": 0.6, "betrays": 0.1}
"""The least of each part of the suspicion whose reason is told."""


@dataclass(frozen=True)
class Usual:
    """What is usual of the images of an audit, with which a group is compared.

    Args:
        centre: patches of all groups in the centre, as `Group.places` has them.
        sources: share of the images of the group's class that come from the source of most of the group's images.
    """

    centre: float
    sources: float = 0.0


def suspect(group: Group, name: str, difference: Effect | None, usual: Usual) -> tuple[float, tuple[str, ...]]:
    """Compute the suspicion of a group, and the reasons: causal · max(aside, betrays).

    - causal: the prediction hangs on the group: 1 − exp(−d), where hiding it costs d log-odds more than hiding random
      patches, less a standard error; at least 0, and 1/2 if it was not measured.
    - aside: it is not the object: the share of its patches off the object where that is known, otherwise
      1 / (1 + r²), where its patches lie r times as often in the centre as those of all groups.
    - betrays: it goes with the class, not with what the class is: the larger of the accuracy that images of the class
      lose without it, and of its excess in one source. What is not known counts as 0.

    That a group is found in images of one class alone does not count: strong patches are evidence for the class that
    is predicted, so nearly all groups are exclusive.

    Args:
        group: its numbers.
        name: of its class.
        difference: what hiding it costs more than hiding random patches; `None` if it was not measured.
        usual: what it is compared with.

    Returns:
        The suspicion, from 0 to 1, and a sentence for each part that is large.
    """
    causal = causal_part(difference)
    aside, betrays = aside_part(group, usual), max(lost_part(group), source_part(group, usual))
    reasons = []
    if lost_part(group) >= TOLD["betrays"]:
        reasons.append(
            f"without it {group.accuracy_without:.0%} of {group.images_without} images of {name} are recognised,"
            f" with it {group.accuracy_with:.0%}"
        )
    if source_part(group, usual) >= TOLD["betrays"]:
        reasons.append(
            f"{group.sources:.0%} of its images come from one source, which has {usual.sources:.0%} of {name}"
        )
    if aside >= TOLD["aside"]:
        reasons.append(_tell_place(group, usual))
    if group.hidden and group.random and difference and is_causal(difference):
        costs = [
            f"{effect.mean:z.1f} ± {effect.error:.1f}".replace("-", "−") for effect in (group.hidden, group.random)
        ]
        reasons.append(f"hiding it costs {costs[0]} log-odds, as many random patches {costs[1]}")
    return causal * max(aside, betrays), tuple(reasons)


def is_causal(difference: Effect) -> bool:
    """Whether hiding a group costs more than hiding random patches, by two standard errors."""
    return difference.mean > max(2 * difference.error, 0)


def causal_part(difference: Effect | None) -> float:
    """How much predictions hang on a group, see `suspect`."""
    if difference is None:
        return 0.5
    return 1 - math.exp(-max(difference.mean - difference.error, 0.0))


def aside_part(group: Group, usual: Usual) -> float:
    """How far a group is from the object, see `suspect`; 1/2 where a grid has no centre."""
    if group.off_object is not None:
        return group.off_object
    if not usual.centre:
        return 0.5
    return 1 / (1 + (group.places["centre"] / usual.centre) ** 2)


def lost_part(group: Group) -> float:
    """The accuracy that images of the class lose without the group, less a standard error; at least 0.

    The accuracy without it is (r + 1) / (n + 2) for r of n, because n is often small.
    """
    if group.accuracy_with is None or group.accuracy_without is None:
        return 0.0
    images = group.images_without + 2
    without = (group.accuracy_without * group.images_without + 1) / images
    return max(group.accuracy_with - without - math.sqrt(without * (1 - without) / images), 0.0)


def source_part(group: Group, usual: Usual) -> float:
    """How far the images of a group come from one source, beyond those of the class: 0 as them, 1 all."""
    if group.sources is None or usual.sources == 1:
        return 0.0
    return max((group.sources - usual.sources) / (1 - usual.sources), 0.0)


def _tell_place(group: Group, usual: Usual) -> str:
    if group.off_object is not None:
        return f"{group.off_object:.0%} of its patches lie off the object"
    place, times = max(group.places.items(), key=lambda item: item[1])
    if place != "centre" and times >= 1.5:
        return f"its patches lie at the {place} {times:.1f} times as often as if they lay anywhere"
    times = group.places["centre"] / usual.centre
    return f"its patches lie in the centre {times:.1f} times as often as those of all groups"
