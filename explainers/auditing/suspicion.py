"""How suspicious a group of evidence is, and why."""

import math

from explainers.auditing.audit import Effect, Group


def suspect(group: Group, difference: Effect | None, name: str) -> tuple[float, tuple[str, ...]]:
    """Compute the suspicion of a group, from 0 to 1, and the reasons.

    It is √(causal · strange): predictions hang on the group, and the group is not what the class is.

    - causal: 1 − exp(−d), where d is by how many log-odds hiding the group costs more than hiding random patches; 0
      unless d is above two standard errors, and 1/2 if it was not measured.
    - strange: the largest sign, see `find_signs`.

    Args:
        group: its numbers.
        difference: what hiding it costs more than hiding random patches; `None` if it was not measured.
        name: of its class.
    """
    causal = 0.5 if difference is None else 1 - math.exp(-difference.mean) if is_causal(difference) else 0.0
    signs = find_signs(group, name)
    reasons = [reason for sign, reason in sorted(signs, reverse=True) if sign >= 0.25]
    if difference is not None and group.hidden is not None and group.random is not None:
        reasons.append(
            f"hiding it costs {group.hidden.mean:.1f} ± {group.hidden.error:.1f} log-odds, as many random patches"
            f" {group.random.mean:.1f} ± {group.random.error:.1f}"
        )
    return math.sqrt(causal * max(sign for sign, _ in signs)), tuple(reasons)


def is_causal(difference: Effect) -> bool:
    """Whether hiding a group costs more than hiding random patches, by two standard errors."""
    return difference.mean > 0 and difference.mean > 2 * difference.error


def find_signs(group: Group, name: str) -> list[tuple[float, str]]:
    """List what tells that a group is not what its class is: how much, from 0 to 1, and a sentence.

    - lost: the accuracy that images of the class lose without the group.
    - surroundings: 1 − c / 2, where its patches lie c times as often in the centre of the image as others. Objects of
      photos are there (c is 2 to 3 for groups on pets that are pasted at random places), backgrounds and logos not.
    - off the object, where it is known: the share of patches there.
    - sources: the share of its images from one subfolder beyond half.
    """
    centre = group.places.get("centre", 2.0)  # grids of two rows have none
    signs = [(max(1 - centre / 2, 0.0), f"{centre:.1f} times as many patches in the centre as by chance")]
    if group.accuracy_with is not None and group.accuracy_without is not None:
        lost = max(group.accuracy_with - group.accuracy_without, 0.0)
        sentence = (
            f"without it {group.accuracy_without:.0%} of {name} are recognised, with it {group.accuracy_with:.0%}"
        )
        signs.append((lost, sentence))
    if group.off_object is not None:
        signs.append((group.off_object, f"{group.off_object:.0%} of its patches lie off the object"))
    if group.sources is not None:
        signs.append((max(2 * group.sources - 1, 0.0), f"{group.sources:.0%} of its images come from one source"))
    return signs
