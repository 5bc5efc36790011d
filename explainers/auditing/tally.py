"""Numbers of groups of evidence, summed over all images shard by shard."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import torch
from torch import Tensor

from explainers.auditing.evidence import Evidence, functionals
from explainers.auditing.groups import Centres, Store, assign
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.runtime.sampling import uniform

PRESENT = 3
"""An image has a group if at least so many of its stored patches belong to it."""

EXAMPLES = 16
"""Images with a group, and images without, that an audit names."""

OnObject = Callable[[Evidence], Tensor]
"""Which stored patches of some images lie on the object: boolean, (B, P)."""


@dataclass(frozen=True, order=True)
class Candidate:
    """An image of a group, in the order in which images are taken.

    Args:
        key: the smallest are taken first.
        number: its place in the list of photos.
        label: index of its class, −1 if it is not known.
        predicted: the class that the model predicts.
        patches: its patches of the group, those with the most evidence first.
    """

    key: tuple[float, ...]
    number: int
    label: int
    predicted: int
    patches: tuple[int, ...]


class Tally:
    """Sums over images, for G groups of K classes on N patches.

    Args:
        centres: the groups.
        num_classes: K.
        num_patches: N.
        hidden: number of images of each group that are drawn for hiding.

    Attributes:
        predicted: number of images predicted as each class, (K,).
        labelled: images with each label, (K,); `right` those that are predicted so.
        totals: positive evidence for each class in the images predicted as it, (K,).
        evidence: evidence of the patches of each group, (G,).
        images: number of images that are predicted as the group's class and have the group, (G,).
        labelled_with: images with the group's class as label that have the group, (G,); `right_with` those that are
            predicted right.
        positions: patches of each group at each place, (G, N).
        own: patches of each group in the images predicted as its class, (G,).
        outside: patches of each group off the object, (G,), if `knows_object`.
        sources: images of each source, for each group, and for each class.
        drawn: images of each group for hiding.
        examples: images with the group, mistakes first, then those with the most evidence.
        without: images of the group's class, by label if it is known, that lack the group; mistakes first.
    """

    def __init__(self, centres: Centres, num_classes: int, num_patches: int, hidden: int) -> None:
        self.centres = centres
        self.num_hidden = hidden
        self.knows_object = False
        groups = len(centres.classes)
        self.predicted, self.labelled, self.right, self.totals = torch.zeros(4, num_classes).double()
        self.evidence, self.images = torch.zeros(2, groups).double()
        self.labelled_with, self.right_with, self.own, self.outside = torch.zeros(4, groups).double()
        self.positions = torch.zeros(groups, num_patches).double()
        self.sources: list[Counter[str]] = [Counter() for _ in range(groups)]
        self.class_sources: list[Counter[str]] = [Counter() for _ in range(num_classes)]
        self.drawn: list[list[Candidate]] = [[] for _ in range(groups)]
        self.examples: list[list[Candidate]] = [[] for _ in range(groups)]
        self.without: list[list[Candidate]] = [[] for _ in range(groups)]

    def add(
        self, shard: Evidence, target: TargetModel, on_object: OnObject | None, sources: Sequence[str] | None
    ) -> None:
        """Add the images of a shard; `sources` has the source of each photo."""
        members = assign(shard, self.centres)  # (B, P)
        labels, predicted = shard.labels.long(), shard.predicted.long()
        v = functionals(target, shard.embeddings.float(), predicted)
        amounts = (shard.vectors.float() @ v[..., None])[..., 0].clamp(min=0)  # (B, P)
        zeros = torch.zeros(len(members), len(self.centres.classes))
        counts = zeros.scatter_add(1, members, torch.ones_like(amounts))  # (B, G)
        evidence = zeros.scatter_add(1, members, amounts)
        has, own = counts >= PRESENT, predicted[:, None] == self.centres.classes
        wrong, labelled = (labels >= 0) & (labels != predicted), labels[:, None] == self.centres.classes
        self._add_classes(labels, predicted, shard.totals)
        self.knows_object = on_object is not None
        self.evidence += (evidence * own).sum(0)
        self.images += (has & own).sum(0)
        self.labelled_with += (has & labelled).sum(0)
        self.right_with += (has & labelled & own).sum(0)
        self.own += (counts * own).sum(0)
        places = members * self.positions.shape[1] + shard.patches.long()
        self.positions += places.flatten().bincount(minlength=self.positions.numel()).view_as(self.positions)
        if on_object is not None:
            self.outside += members[~on_object(shard)].bincount(minlength=len(self.outside))
        self._add_images(shard, members, evidence, has, own, labelled | (own & (labels < 0)[:, None]), wrong)
        if sources is not None:
            names = [sources[number] for number in shard.numbers.tolist()]
            for row, group in (has & own).nonzero().tolist():
                self.sources[group][names[row]] += 1
            for name, of in zip(names, predicted.tolist(), strict=True):
                self.class_sources[of][name] += 1

    def _add_classes(self, labels: Tensor, predicted: Tensor, totals: Tensor) -> None:
        def count(classes: Tensor) -> Tensor:
            return classes.bincount(minlength=len(self.predicted))

        self.predicted += count(predicted)
        self.labelled += count(labels[labels >= 0])
        self.right += count(labels[labels == predicted])
        self.totals.index_add_(0, predicted, totals.double())

    def _add_images(
        self,
        shard: Evidence,
        members: Tensor,
        evidence: Tensor,
        has: Tensor,
        own: Tensor,
        of_class: Tensor,
        wrong: Tensor,
    ) -> None:
        """Keep the first images of each group: candidates for hiding, examples, and images without."""
        luck = uniform(shard.numbers.long(), seed=0).tolist()

        def take(kept: list[Candidate], key: tuple[float, ...], row: int, group: int, most: int) -> None:
            if not most or (len(kept) == most and kept[-1].key <= key):
                return
            patches = shard.patches[row][members[row] == group].tolist()
            about = int(shard.numbers[row]), int(shard.labels[row]), int(shard.predicted[row])
            kept.append(Candidate(key, *about, tuple(patches)))
            kept.sort()
            del kept[most:]

        for row, group in (has & own).nonzero().tolist():
            mistake = float(not wrong[row])
            take(self.examples[group], (mistake, -evidence[row, group].item()), row, group, EXAMPLES)
            take(self.drawn[group], (luck[row],), row, group, self.num_hidden)
        for row, group in (~has & of_class).nonzero().tolist():
            take(self.without[group], (float(not wrong[row]), luck[row]), row, group, EXAMPLES)


@torch.no_grad()
def tally(
    store: Store,
    target: TargetModel,
    centres: Centres,
    num_patches: int,
    on_object: OnObject | None = None,
    sources: Sequence[str] | None = None,
    hidden: int = 32,
) -> Tally:
    """Sum all that `Group` says, in one pass over the shards; only one of them is in memory."""
    sums = Tally(centres, target.num_classes, num_patches, hidden)
    for shard in store.shards():
        sums.add(shard, target, on_object, sources)
    return sums


def find_share(part: Tensor, whole: Tensor) -> float | None:
    """The share of a part; `None` of nothing."""
    return (part / whole).item() if whole else None


def find_sources(names: Sequence[str]) -> list[str] | None:
    """Return the subfolder of the class folder of each file, relative to the folder of classes; `None` without any.

    >>> find_sources(["cat/flickr/1.jpg", "cat/2.jpg"]), find_sources(["cat/1.jpg", "dog/2.jpg"])
    (['flickr', ''], None)
    """
    sources = ["/".join(PurePath(name).parts[1:-1]) for name in names]
    return sources if any(sources) else None


def place_masks(rows: int, columns: int) -> dict[str, Tensor]:
    """The places of a grid, boolean (N,): the outermost ring, its corners of 2 × 2 patches, and the inner half.

    >>> {name: int(mask.sum()) for name, mask in place_masks(14, 14).items()}
    {'border': 52, 'corner': 16, 'centre': 36}
    """
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    from_edge = torch.minimum(row, rows - 1 - row), torch.minimum(column, columns - 1 - column)
    return {
        "border": torch.minimum(*from_edge).eq(0).flatten(),
        "corner": torch.maximum(*from_edge).lt(2).flatten(),
        "centre": ((from_edge[0] * 4 >= rows) & (from_edge[1] * 4 >= columns)).flatten(),
    }


def share_places(positions: Tensor, grid: PatchGrid) -> dict[str, float]:
    """Divide the share of patches (N,) at each place by the share of the area that it takes; no place without area."""
    masks = place_masks(*grid.shape)
    return {name: (positions[mask].sum() / mask.double().mean()).item() for name, mask in masks.items() if mask.any()}


def inside_masks(masks: Tensor) -> OnObject:
    """Patches on the object by masks of all photos, boolean (photos, N)."""
    return lambda shard: masks[shard.numbers.long()].gather(1, shard.patches.long())
