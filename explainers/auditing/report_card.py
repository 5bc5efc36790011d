"""What an edited head does to accuracy and to evidence, beside the head as it was."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from explainers.auditing.evidence import Evidence
from explainers.auditing.groups import Centres, Store, assign
from explainers.auditing.tally import PRESENT, find_share
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
        share: of the positive evidence of the stored patches for the class, in the images predicted as it.
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
        agreement: share of images for which both heads predict the same class.
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
    """Compare a head, such as a repaired one, with the target's own on stored evidence, without a forward pass.

    Args:
        store: evidence of the images, of the audit or of others.
        target: the model with the head as it was.
        after: the other head, on the same backbone.
        centres: all groups, in the order of the audit.
        groups: numbers of the groups that were taken out.
    """
    heads, chosen = (target.head, after), torch.tensor(list(groups))
    of_shards = []
    evidence = torch.zeros(len(chosen), 2, 2).double()  # before and after: of the group, and of all stored patches
    for shard in store.shards():
        points = shard.embeddings.to(target.mean)
        predicted = torch.stack([head(points).argmax(-1).cpu() for head in heads], 1)  # (B, 2)
        inside = assign(shard, centres)[..., None] == chosen  # (B, P, G)
        of_shards.append((shard.labels.long(), predicted, inside.sum(1) >= PRESENT))
        for row, of in enumerate(centres.classes[chosen].tolist()):
            own = predicted[:, 0] == of
            for when, head in enumerate(heads):
                amounts = _measure_evidence(shard, target, head, own, of)
                evidence[row, when] += torch.stack([(amounts * inside[own, :, row]).sum(), amounts.sum()])
    labels, predicted, has = (torch.cat(parts) for parts in zip(*of_shards, strict=True))
    right = (predicted == labels[:, None]).double()

    def measure_accuracy(images: Tensor) -> Pair:
        before, after = right[images & (labels >= 0)].unbind(1)
        return (before.mean().item(), after.mean().item()) if len(before) else (None, None)

    group_cards = []
    for row, group in enumerate(groups):
        accuracies = measure_accuracy(has[:, row]), measure_accuracy(~has[:, row])
        shares = find_share(*evidence[row, 0]), find_share(*evidence[row, 1])
        of = int(centres.classes[group])
        group_cards.append(GroupCard(group, of, int(has[:, row].sum()), *accuracies, shares))
    of_classes = [(of, labels == of) for of in labels[labels >= 0].unique().tolist()]
    class_cards = [ClassCard(of, int(images.sum()), measure_accuracy(images)) for of, images in of_classes]
    changed = sorted(filter(_change, class_cards), key=_change, reverse=True)[:CHANGED]
    agreement = (predicted[:, 0] == predicted[:, 1]).double().mean().item()
    accuracy = measure_accuracy(labels >= 0)
    return ReportCard(len(labels), agreement, accuracy, tuple(group_cards), tuple(changed), tuple(target.classes))


def _measure_evidence(shard: Evidence, target: TargetModel, head: nn.Module, own: Tensor, of: int) -> Tensor:
    """Positive evidence of stored patches for a class under a head, in some images, (b, P)."""
    points = shard.embeddings[own].to(target.mean)
    temperature = choose_temperature(target.score, torch.inf)
    v = head_functionals(head, points, temperature, torch.full((len(points),), of, device=points.device)).cpu()
    return (shard.vectors[own].float() @ v[..., None])[..., 0].clamp(min=0).double()


def _change(card: ClassCard) -> float:
    before, after = card.accuracy
    return abs((after or 0) - (before or 0))
