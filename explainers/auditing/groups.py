"""Groups of evidence: clusters of patches that add the same to a class."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.auditing.evidence import Evidence, functionals
from explainers.errors import InputError, check_positive, needs
from explainers.models import TargetModel
from explainers.runtime.sampling import uniform

FEWEST = 10
"""Images of a class, and patches of them with evidence for it, below which they are not grouped."""

MOST_GROUPS = 10
"""Groups of a class among which the criterion chooses, from 2."""

GAIN = 0.02
"""Share of the spread of a class that one more group has to explain."""

BYTES = 2**30
"""Memory for the vectors that are clustered, as many classes at once as fit."""


class Store(Protocol):
    """Evidence of all images, such as an `EvidenceStore`, or one in memory."""

    def shards(self) -> Iterator[Evidence]:
        """Read one shard after the other, as often as this is called."""
        ...


@dataclass(frozen=True)
class Centres:
    """The mean direction of each group.

    Args:
        directions: vectors of length 1, (G, D), float32.
        classes: the class for which each group is evidence, (G,), ascending.
    """

    directions: Tensor
    classes: Tensor

    def select(self, order: Sequence[int]) -> "Centres":
        """The centres of some groups, in this order."""
        return Centres(self.directions[list(order)], self.classes[list(order)])


@torch.no_grad()
def find_groups(
    store: Store,
    target: TargetModel,
    groups: int | None = None,
    images: int = 200,
    strongest: int = 20,
    seed: int = 0,
) -> Centres:
    """Cluster the strongest patches of each predicted class by the direction of their vectors (spherical k-means).

    A patch counts if it has positive evidence for the class. All count alike: weights made groups less stable. Vectors
    of at most `BYTES` are in memory; classes that do not fit take further passes over the store. Classes predicted for
    fewer than `FEWEST` images are left out, with a warning.

    Args:
        store: evidence of all images; one shard is in memory at a time.
        target: the model, whose head says what is evidence.
        groups: number of groups of each class; `None` to choose it for each class, see `choose_number`.
        images: number of images of each class that are clustered, drawn at random.
        strongest: number of patches of each image that are clustered.
        seed: of the draw and of k-means.

    Raises:
        InputError: if a class has fewer patches than `groups`, or no class has enough images.
    """
    check_positive(images=images, strongest=strongest, **({} if groups is None else {"groups": groups}))
    drawn, width, skipped = _draw(store, images, seed)
    at_once = max(1, BYTES // (images * strongest * width * 4))
    directions, classes, most = [], [], 0
    for some in torch.tensor(sorted(drawn)).split(at_once):
        members = _members(store, target, {of: drawn[of] for of in some.tolist()}, strongest)
        for of, vectors in members.items():
            most = max(most, len(vectors))
            if len(vectors) < FEWEST:
                skipped.append(of)
                continue
            if groups is not None and groups > len(vectors):
                raise InputError(
                    f"expected groups of at most {len(vectors)}, the number of patches with evidence for class {of},"
                    f" got groups={groups}: take fewer",
                    "groups",
                )
            found = cluster(vectors, groups or choose_number(vectors, seed), seed)
            directions.append(found)
            classes += [of] * len(found)
    if not directions:
        raise InputError(
            f"expected at least {FEWEST} patches with evidence for a class in the images predicted as it, got"
            f" at most {most}: give other images, or check the weights of the head"
        )
    if skipped:
        named = ", ".join(map(str, skipped[:5])) + ", ..." * (len(skipped) > 5)
        kind = "class" if len(skipped) == 1 else "classes"
        warnings.warn(
            f"left out: {len(skipped)} {kind} with fewer than {FEWEST} images or patches of evidence: {named}",
            stacklevel=2,
        )
    return Centres(torch.cat(directions), torch.tensor(classes))


def cluster(vectors: Tensor, groups: int, seed: int) -> Tensor:
    """Spherical k-means: unit centres (G, D) of unit vectors (n, D)."""
    return F.normalize(torch.from_numpy(_fit(vectors, groups, seed).cluster_centers_).float(), dim=-1)


def choose_number(vectors: Tensor, seed: int) -> int:
    """Choose the number of groups: the smallest after which one more explains less than `GAIN` of the spread.

    The spread of unit vectors (n, D) is their squared distance from their mean.
    """
    most = min(MOST_GROUPS, len(vectors) - 1)
    whole = spread = _fit(vectors, 1, seed).inertia_
    for groups in range(2, most + 1):
        narrower = _fit(vectors, groups, seed).inertia_
        if spread - narrower < GAIN * whole:
            return groups - 1
        spread = narrower
    return max(most, 1)


def assign(evidence: Evidence, centres: Centres, chunk: int = 2**26) -> Tensor:
    """Assign every stored patch to the group with the nearest centre by cosine, of all classes: int64, (B, P).

    Args:
        evidence: B images.
        centres: G groups.
        chunk: number of cosines in memory at once.
    """
    flat = evidence.vectors.flatten(0, 1)
    rows = max(1, chunk // len(centres.directions))
    nearest = [(some.float() @ centres.directions.mT).argmax(-1) for some in flat.split(rows)]
    return torch.cat(nearest).view(evidence.patches.shape)


def compare_groups(evidence: Evidence, centres: Centres, others: Centres) -> float:
    """Adjusted Rand index of the patches of some images in two sets of groups: 1 if they agree, 0 as by chance.

    Groups of another seed, `find_groups(..., seed=1)`, tell how stable groups are over images and starts of k-means.
    """
    needs("sklearn", "methods", "explainers audit")
    from sklearn.metrics import adjusted_rand_score

    first, second = (assign(evidence, each).flatten().numpy() for each in (centres, others))
    return float(adjusted_rand_score(first, second))


def _fit(vectors: Tensor, groups: int, seed: int) -> Any:
    """k-means of scikit-learn, fitted."""
    needs("sklearn", "methods", "explainers audit")
    from sklearn.cluster import KMeans

    return KMeans(groups, n_init=4, random_state=seed).fit(vectors.numpy())


def _draw(store: Store, images: int, seed: int) -> tuple[dict[int, Tensor], int, list[int]]:
    """Draw at most so many images of each predicted class: class → their numbers; the width D; classes with too few."""
    shards = [(shard.numbers, shard.predicted, shard.vectors.shape[-1]) for shard in store.shards()]
    numbers = torch.cat([each[0] for each in shards]).long()
    predicted = torch.cat([each[1] for each in shards]).long()
    order = uniform(numbers, seed).argsort(stable=True)
    order = order[predicted[order].argsort(stable=True)]
    classes, counts = predicted.unique(return_counts=True)
    by_class = dict(zip(classes.tolist(), numbers[order].split(counts.tolist()), strict=True))
    drawn = {of: members[:images] for of, members in by_class.items() if len(members) >= FEWEST}
    if not drawn:
        most = f"{counts.max()} of {len(numbers)}: give more images, or a head of fewer classes"
        raise InputError(f"expected a class that is predicted for at least {FEWEST} images, got at most {most}")
    return drawn, shards[0][2], [of for of in by_class if of not in drawn]


def _members(store: Store, target: TargetModel, drawn: dict[int, Tensor], strongest: int) -> dict[int, Tensor]:
    """Collect the unit vectors (n, D) of the patches that count for each class."""
    wanted = torch.cat(list(drawn.values()))
    parts: dict[int, list[Tensor]] = {of: [] for of in drawn}
    for shard in store.shards():
        rows = torch.isin(shard.numbers, wanted).nonzero()[:, 0]
        vectors, predicted = shard.vectors[rows].float(), shard.predicted[rows].long()
        v = functionals(target, shard.embeddings[rows].float(), predicted)
        evidence = (vectors @ v[..., None])[..., 0]  # (b, P)
        top = evidence.topk(min(strongest, evidence.shape[1])).indices
        counts = torch.zeros_like(evidence, dtype=torch.bool).scatter(1, top, True) & (evidence > 0)
        for of in predicted.unique().tolist():
            own = predicted == of
            parts[of].append(F.normalize(vectors[own][counts[own]], dim=-1))
    return {of: torch.cat(part) for of, part in parts.items()}
