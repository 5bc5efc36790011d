"""What an edited head does to accuracy and to evidence, beside the head as it was."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from explainers.auditing.evidence import Evidence
from explainers.auditing.groups import Centres, Store, assign
from explainers.auditing.tally import PRESENT
from explainers.models import TargetModel
from explainers.models.functionals import choose_temperature, head_functionals

CHANGED = 10
"""Number of classes in a report card: those whose accuracy changes most."""

Pair = tuple[float | None, float | None]
"""A share before and after; `None` where it is not known, or of no images."""


@dataclass(frozen=True)
class GroupCard:
    """A group that was taken out.

    Args:
        group: its number in the audit.
        class_index: the class for which it is evidence.
        images: number of images that have it.
        accuracy_with: share predicted right of the labelled images that have it.
        accuracy_without: the same of the images that lack it.
        share: of the positive evidence of the stored patches for the class, in images of which the class was predicted.
    """

    group: int
    class_index: int
    images: int
    accuracy_with: Pair
    accuracy_without: Pair
    share: Pair


@dataclass(frozen=True)
class ClassCard:
    """A class whose accuracy changes.

    Args:
        class_index: the class.
        images: number of images with this label.
        accuracy: share of them that are predicted right.
    """

    class_index: int
    images: int
    accuracy: Pair


@dataclass(frozen=True)
class ReportCard:
    """Two heads on the same images. `str` of it is a table.

    Args:
        images: number of images.
        agreement: share of images of which both heads predict the same class.
        accuracy: share of the labelled images that are predicted right.
        groups: the groups that were taken out.
        classes: at most `CHANGED` classes whose accuracy changes, most first.
        names: names of the model's classes; empty if they are not known.
    """

    images: int
    agreement: float
    accuracy: Pair
    groups: tuple[GroupCard, ...]
    classes: tuple[ClassCard, ...]
    names: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """All numbers, for programs."""
        return asdict(self)

    def __str__(self) -> str:
        def name(index: int) -> str:
            return self.names[index] if self.names else f"class {index}"

        rows: list[tuple[str, int, Pair]] = [("accuracy", self.images, self.accuracy)]
        for card in self.groups:
            of = f"group {card.group} ({name(card.class_index)})"
            rows += [
                (f"{of}: share of evidence", card.images, card.share),
                (f"{of}: accuracy with it", card.images, card.accuracy_with),
                (f"{of}: accuracy without", self.images - card.images, card.accuracy_without),
            ]
        rows += [(f"accuracy of {name(card.class_index)}", card.images, card.accuracy) for card in self.classes]
        width = max(len(title) for title, *_ in rows)
        lines = [f"{'':{width}}  images  before   after"]
        for title, images, pair in rows:
            shares = "".join(f"{'-' if share is None else f'{share:.3f}':>8}" for share in pair)
            lines.append(f"{title:{width}}  {images:6}{shares}")
        return "\n".join([*lines, f"same class predicted: {self.agreement:.1%}"])


@torch.no_grad()
def grade_heads(
    store: Store, target: TargetModel, after: nn.Module, centres: Centres, groups: Sequence[int]
) -> ReportCard:
    """Compare a head, such as that of a `Repair`, with the target's own on stored evidence, without a forward pass.

    Args:
        store: evidence of the images, of the audit or of others.
        target: the model with the head as it was.
        after: the other head, on the same backbone.
        centres: all groups, in the order of the audit.
        groups: numbers of the groups that were taken out.
    """
    sums = _Sums(target, after, centres, groups)
    for shard in store.shards():
        sums.add(shard)
    right, count = sums.right, sums.labelled
    cards = [
        GroupCard(
            group,
            int(centres.classes[group]),
            int(sums.having[row]),
            _pair(sums.right_with[row], sums.labelled_with[row]),
            _pair(right.sum(0) - sums.right_with[row], count.sum() - sums.labelled_with[row]),
            (_ratio(*sums.evidence[row, 0]), _ratio(*sums.evidence[row, 1])),
        )
        for row, group in enumerate(groups)
    ]
    change = ((right[:, 1] - right[:, 0]) / count.clamp(min=1)).abs()
    order = [each for each in change.argsort(descending=True, stable=True).tolist() if change[each] > 0]
    changed = tuple(ClassCard(each, int(count[each]), _pair(right[each], count[each])) for each in order[:CHANGED])
    agreement = sums.agreeing / sums.images
    return ReportCard(
        sums.images, agreement, _pair(right.sum(0), count.sum()), tuple(cards), changed, tuple(target.classes)
    )


class _Sums:
    """Counts over images, before and after (…, 2), for K classes and G groups that were taken out."""

    def __init__(self, target: TargetModel, after: nn.Module, centres: Centres, groups: Sequence[int]) -> None:
        self.target = target
        self.heads = (target.head, after)
        self.centres = centres
        self.groups = torch.tensor(list(groups))
        self.images = self.agreeing = 0
        self.right = torch.zeros(target.num_classes, 2).double()
        self.labelled = torch.zeros(target.num_classes).double()
        self.having, self.labelled_with = torch.zeros(2, len(groups)).double()
        self.right_with = torch.zeros(len(groups), 2).double()
        self.evidence = torch.zeros(len(groups), 2, 2).double()  # of the group, of all patches

    def add(self, shard: Evidence) -> None:
        """Add the images of a shard."""
        points, labels = shard.embeddings.to(self.target.mean), shard.labels.long()
        predicted = torch.stack([head(points).argmax(-1).cpu() for head in self.heads], 1)  # (B, 2)
        inside = assign(shard, self.centres)[..., None] == self.groups  # (B, P, G)
        has = (inside.sum(1) >= PRESENT).double()
        known = labels >= 0
        right = (predicted == labels[:, None]).double()
        self.images += len(labels)
        self.agreeing += int((predicted[:, 0] == predicted[:, 1]).sum())
        self.right.index_add_(0, labels[known], right[known])
        self.labelled += labels[known].bincount(minlength=len(self.labelled))
        self.having += has.sum(0)
        self.labelled_with += has[known].sum(0)
        self.right_with += has[known].mT @ right[known]
        for row, of in enumerate(self.centres.classes[self.groups].tolist()):
            own = predicted[:, 0] == of
            for when, head in enumerate(self.heads):
                amounts = self._evidence(shard, head, own, of)
                self.evidence[row, when] += torch.stack([(amounts * inside[own, :, row]).sum(), amounts.sum()])

    def _evidence(self, shard: Evidence, head: nn.Module, own: Tensor, of: int) -> Tensor:
        """Positive evidence of stored patches for a class under a head, in some images, (b, P)."""
        points = shard.embeddings[own].to(self.target.mean)
        temperature = choose_temperature(self.target.score, torch.inf)
        v = head_functionals(head, points, temperature, torch.full((len(points),), of, device=points.device)).cpu()
        return (shard.vectors[own].float() @ v[..., None])[..., 0].clamp(min=0).double()


def _pair(right: Tensor, count: Tensor) -> Pair:
    return _ratio(right[0], count), _ratio(right[1], count)


def _ratio(part: Tensor, whole: Tensor) -> float | None:
    return (part / whole).item() if whole else None
