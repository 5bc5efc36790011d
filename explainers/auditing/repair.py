"""Heads that rely less on marked groups of evidence, made without training and without new images."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from explainers.auditing.groups import Centres, Store, assign
from explainers.auditing.hiding import Photos
from explainers.auditing.tally import PRESENT, find_share
from explainers.errors import InputError, check_positive, check_range, checks_choices, fits
from explainers.masking import Removal
from explainers.models import TargetModel
from explainers.models.functionals import class_rows
from explainers.models.heads import ProjectedHead, save_head
from explainers.models.removal import masked_outputs
from explainers.runtime.modes import finest_dtype
from explainers.runtime.progress import advance, show_passes
from explainers.runtime.sampling import uniform
from explainers.saved.identity import Identity

STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Strengths among which `repair` chooses. A class of a thousand needs a small one, one of two a large one."""

RIDGE = 1e-3
"""Share of the mean second moment that is added to all directions, for those that no other patch has."""

BATCH = 16
"""Images that are explained at once."""


@dataclass(frozen=True)
class Price:
    """What a repair of some strength does to images from which it was not computed.

    Args:
        strength: 0 for the head as it was.
        reliance: of the scores of the groups' classes on the groups, see `measure_reliance`; their mean.
        agreement: share of images that keep the class that the head predicted before.
        accuracy: share of images that are predicted right; `None` without labels, as for the next two.
        accuracy_with: the same among images with stored patches of the groups.
        accuracy_without: the same among the others; `None` if there are none.
    """

    strength: float
    reliance: float
    agreement: float
    accuracy: float | None
    accuracy_with: float | None
    accuracy_without: float | None


@dataclass(frozen=True)
class Repair:
    """A head that relies less on some groups.

    Args:
        head: the head, linear or of cosines.
        strength: λ, see `find_removal`.
        groups: numbers of the groups.
        classes: the classes for which they are evidence.
        curve: what each strength costs, from 0; empty if the strength was given.
        names: names of the model's classes.
        backbone: identity of the model without its head.
    """

    head: nn.Module
    strength: float
    groups: tuple[int, ...]
    classes: tuple[int, ...]
    curve: tuple[Price, ...]
    names: tuple[str, ...]
    backbone: Identity

    def save(self, path: str | Path) -> Path:
        """Write the head to a file that `load_head` reads: target.head= of train.py and eval.py, --head, `head=`."""
        return save_head(self.head, Path(path), self.backbone, self.names)


def neutralise_rows(weight: Tensor, classes: Sequence[int], removal: Tensor, compete: bool = True) -> Tensor:
    """Take what a map T keeps of the contrasts of some classes out of their rows: W_y − T (W_y − W̄).

    W̄ is the mean row of the other classes; of all, if all are given. For a projection T on some directions, no contrast
    v_y = W_y − the mean of the other rows has a component along them any more; nothing else changes. So two classes
    have the same contrast whether one or both are given.

    Args:
        weight: W, (K, D).
        classes: the classes.
        removal: T, (D, D).
        compete: False for classes that do not, whose score is their logit: then W̄ is 0.

    >>> neutralise_rows(torch.tensor([[3.0, 4.0], [1.0, 1.0]]), [0], torch.diag(torch.tensor([1.0, 0.0]))).tolist()
    [[1.0, 4.0], [1.0, 1.0]]
    """
    others = [each for each in range(len(weight)) if each not in classes] or range(len(weight))
    mean = weight[list(others)].mean(0) if compete else 0
    result = weight.clone()
    result[list(classes)] -= (weight[list(classes)] - mean) @ removal.mT
    return result


def find_removal(group: Tensor, others: Tensor, strength: float) -> Tensor:
    """Find the map T that takes from any functional v what patches of a group add, and keeps what others add.

    v' = v − T v minimises E_others[((v' − v) · c)²] + λ E_group[(v' · c)²], so T = (M_others + λ M_group)⁻¹ λ M_group.
    If others are alike in all directions and the group has only a few, T is their projection for a large λ.

    Args:
        group: M_group, the second moment of the vectors c of the group, the mean of c cᵀ, (D, D).
        others: M_others, that of all other patches.
        strength: λ.
    """
    width = len(others)
    ridge = RIDGE * others.trace() / width * torch.eye(width, dtype=others.dtype, device=others.device)
    return torch.linalg.solve(others + ridge + strength * group, strength * group)


def measure_reliance(scores: Tensor, hidden: Tensor) -> float:
    """Measure how much scores rely on patches: the mean squared change when they are hidden, in variances of the rest.

    Scores that the other patches decide alone have 0. Any factor of the scores leaves the result as it is.

    Args:
        scores: scores of whole images, (B,).
        hidden: scores of the same images with the patches hidden, (B,).

    >>> measure_reliance(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0]))
    1.0
    """
    return ((scores - hidden).square().mean() / hidden.var(correction=0).clamp(min=1e-12)).item()


@torch.no_grad()
@checks_choices
def repair(
    store: Store,
    explainer: Any,
    centres: Centres,
    groups: Sequence[int],
    photos: Photos,
    *,
    strength: float | None = None,
    held_out: tuple[Store, Photos] | None = None,
    images: int = 512,
    removal: Removal = "zero",
    seed: int = 0,
) -> Repair:
    """Edit the head of a model, so that patches of some groups add less to their classes, see `find_removal`.

    The vectors of all patches of some images are computed anew, because a store has only the strongest. A patch belongs
    to the group with the nearest centre. The strength is chosen on other images, from passes with these patches hidden:
    that with the smallest `measure_reliance`. The mean logits of all images stay as they are. Labels only say what a
    strength costs.

    Args:
        store: evidence of all images.
        explainer: the one of the store, with `target` and `grid`.
        centres: all groups, in the order of the audit.
        groups: numbers of the groups to take out.
        photos: reads photos by their numbers in the store.
        strength: λ; `None` chooses one of `STRENGTHS`.
        held_out: evidence and photos on which the strength is chosen; `None` for half of the drawn images.
        images: number of images to draw, half of them of the classes of these groups.
        removal: what replaces hidden patches.
        seed: of the draw.

    Returns:
        The edited head, and what each strength costs.

    Raises:
        InputError: if the head is neither linear nor of cosines, a number is no group, no drawn image has patches of
            the groups, or no strength makes the head rely less on them.
    """
    target: TargetModel = explainer.target
    if strength is not None:
        check_positive(strength=strength)
        check_range(0, 1e6, strength=strength)  # a larger one only adds errors of rounding
    check_groups(groups, len(centres.classes))
    classes = sorted({int(centres.classes[group]) for group in groups})
    members = Members(explainer, centres, groups)
    edit = HeadEdit(target, classes)
    drawn = draw_images(store, classes, images, seed)
    fitted = drawn if held_out else drawn[::2]
    apart, read = held_out or (store, photos)
    tried = draw_images(apart, classes, images, seed) if held_out else drawn[1::2]
    with show_passes("repairing the head", len(fitted) + 2 * len(tried) * (strength is None)):
        moments = measure_moments(members, edit, photos, fitted)
        edit.measure_mean(store)
        strengths = STRENGTHS if strength is None else (strength,)
        heads = {each: edit.apply(find_removal(*moments, each)) for each in (0.0, *strengths)}
        curve: tuple[Price, ...] = ()
        if strength is None:
            hidden = hide_members(members, read, tried, removal)
            curve = measure_curve(heads, edit, members, apart, hidden, () if held_out else fitted)
            strength = choose_strength(curve)
    names, backbone = tuple(target.classes), target.backbone_identity()
    return Repair(heads[strength], strength, tuple(groups), tuple(classes), curve, names, backbone)


def check_groups(groups: Sequence[int], count: int) -> None:
    """Raise an InputError unless there are some groups, each once and from 0 to `count` − 1."""
    listed = isinstance(groups, Sequence) and not isinstance(groups, str)
    known = listed and all(fits(group, int) and 0 <= group < count for group in groups)
    if not known or not groups or len(set(groups)) < len(groups):
        given = (", ".join(map(repr, groups)) or "none") if listed else f"{groups!r}, which is no list"
        wanted = f"different numbers of groups from 0 to {count - 1}"
        raise InputError(f"without: expected {wanted}, got {given}: take those that the audit prints", "without")


def choose_strength(curve: Sequence[Price]) -> float:
    """The strength with the smallest reliance; an InputError if that is 0, the head as it is."""
    best = min(curve, key=lambda price: price.reliance)
    if best.strength == 0:
        raise InputError(
            "without: expected groups on which a repair makes the head rely less, got a reliance of"
            f" {best.reliance:.3f} as it is, and more at any strength: take others besides, or give strength=1",
            "without",
            "strength",
        )
    return best.strength


class Members:
    """Finds the patches of some groups in images: those to which one of these has the nearest centre of all groups."""

    def __init__(self, explainer: Any, centres: Centres, groups: Sequence[int]) -> None:
        self.explainer = explainer
        self.target: TargetModel = explainer.target
        self.centres = centres
        self.groups = torch.tensor(list(groups))

    def read(self, photos: Photos, numbers: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Images (B, C, H, W), c_z (B, N, D), embeddings (B, D), and which patches are members, boolean (B, N)."""
        device = self.target.mean.device
        for start in range(0, len(numbers), BATCH):
            images, kept = photos(numbers[start : start + BATCH])
            if not kept:
                continue
            images = images.to(device)
            vectors, embeddings = (each.float() for each in self.explainer.decompose(images))
            nearest = (vectors @ self.centres.directions.to(device).mT).argmax(-1)
            advance(len(images))
            yield images, vectors, embeddings, torch.isin(nearest, self.groups.to(device))

    def read_stored(self, store: Store) -> Iterator[tuple[Any, Tensor]]:
        """Each shard, and which of its images have the groups, boolean (B,)."""
        for shard in store.shards():
            yield shard, torch.isin(assign(shard, self.centres), self.groups).sum(-1) >= PRESENT


class HeadEdit:
    """Edits the rows of some classes of a linear or cosine head, and its bias so that mean logits stay.

    Args:
        target: the model, which is not changed; an InputError if its head is of another kind.
        classes: the classes.
    """

    def __init__(self, target: TargetModel, classes: Sequence[int]) -> None:
        self.target = target
        self.classes = classes
        self.cosine = target.head if isinstance(target.head, ProjectedHead) and target.head.normalise else None
        if self.cosine is not None:
            self.weight = self.cosine.weight.float()
        else:
            self.weight = class_rows(target.head, target.embed_dim, target.mean).float()
        self.mean = torch.zeros_like(self.weight[0])

    def project(self, vectors: Tensor, normalise: bool = False) -> Tensor:
        """Vectors (..., D) as the rows meet them."""
        return vectors if self.cosine is None else self.cosine.project(vectors, normalise)

    def score(self, weight: Tensor, points: Tensor, of: int) -> Tensor:
        """Scores of a class for rows (K, D) at points (B, D), without a bias: (B,).

        The score is the logit, minus the mean of the others if classes compete. Cosines are compared for a constant
        length of the embedding, or all would grow when hidden patches leave the embedding short.
        """
        row = weight[of]
        if self.target.score == "softmax":
            row = row - weight[[each != of for each in range(len(weight))]].mean(0)
        return self.project(points) @ row

    def measure_mean(self, store: Store) -> None:
        """Set the mean of the embeddings of all images, of length 1 for cosines."""
        total, count = torch.zeros_like(self.mean, dtype=finest_dtype(self.mean.device)), 0
        for shard in store.shards():
            points = self.project(shard.embeddings.float().to(self.mean.device), True)
            total, count = total + points.to(total).sum(0), count + len(points)
        self.mean = (total / count).float()

    def apply(self, removal: Tensor) -> nn.Linear | ProjectedHead:
        """The head without what a map (D, D) keeps, see `neutralise_rows`."""
        weight = neutralise_rows(self.weight, self.classes, removal.to(self.weight), self.target.score == "softmax")
        shift = (self.weight - weight) @ self.mean
        if self.cosine is not None:
            scale = self.cosine.scale.item()
            bias = scale * shift + (0 if self.cosine.bias is None else self.cosine.bias)
            return ProjectedHead(weight, self.cosine.projection, True, scale, bias)
        head = nn.Linear(weight.shape[1], len(weight), device=weight.device)
        bias = self.target.classify(torch.zeros_like(self.mean)) + shift
        head.load_state_dict({"weight": weight, "bias": bias})
        return head.requires_grad_(False)


def draw_images(store: Store, classes: Sequence[int], images: int, seed: int) -> list[int]:
    """Draw at most so many images by chance, in any order; half of them, where there are enough, of some classes.

    An image is of a class if the model predicts it, or if it is its label.
    """
    shards = [(shard.numbers.long(), shard.labels.long(), shard.predicted.long()) for shard in store.shards()]
    numbers, labels, predicted = (torch.cat(parts) for parts in zip(*shards, strict=True))
    wanted = torch.tensor(list(classes))
    of_classes = torch.isin(labels, wanted) | torch.isin(predicted, wanted)
    luck = uniform(numbers, seed).argsort(stable=True)
    own, others = luck[of_classes[luck]], luck[~of_classes[luck]]
    few = max(images // 2, images - len(others))
    chosen = torch.cat([own[:few], others[: images - len(own[:few])]])
    return numbers[chosen[torch.argsort(uniform(numbers[chosen], seed + 1), stable=True)]].tolist()


def measure_moments(members: Members, edit: HeadEdit, photos: Photos, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The second moments of the vectors of members and of all other patches, each (D, D)."""
    width = edit.weight.shape[1]
    finest = finest_dtype(edit.weight.device)
    sums = torch.zeros(2, width, width, dtype=finest, device=edit.weight.device)
    counts = [0, 0]
    for _, vectors, _, inside in members.read(photos, numbers):
        for which, chosen in enumerate((inside, ~inside)):
            rows = edit.project(vectors[chosen]).to(finest)
            sums[which] += rows.mT @ rows
            counts[which] += len(rows)
    if not all(counts):
        part = "no patch" if counts[1] else "all patches"
        raise InputError(
            f"without: expected groups with some patches of {len(numbers)} images, got {part}: mark"
            f" {'others' if counts[1] else 'fewer'}",
            "without",
        )
    group, others = (total / count for total, count in zip(sums, counts, strict=True))
    return group, others


def hide_members(members: Members, photos: Photos, numbers: Sequence[int], removal: Removal) -> tuple[Tensor, Tensor]:
    """The embeddings of whole images, and of those whose members are hidden, each (B, D)."""
    target, grid = members.target, members.explainer.grid
    parts = []
    for images, _, embeddings, inside in members.read(photos, numbers):
        keep = ~inside[:, None]
        hidden = masked_outputs(target, nn.Identity(), target.normalise(images), keep, grid, removal)[:, 0]
        parts.append((embeddings, hidden.float()))
    whole, hidden = (torch.cat(part) for part in zip(*parts, strict=True))
    return whole, hidden


def measure_curve(
    heads: Mapping[float, Any],
    edit: HeadEdit,
    members: Members,
    store: Store,
    embeddings: tuple[Tensor, Tensor],
    fitted: Sequence[int],
) -> tuple[Price, ...]:
    """Measure what heads of some strengths do.

    Args:
        heads: strength → head, linear or of cosines.
        edit: the edit; its target has the head as it was.
        members: the patches of the groups.
        store: evidence of the images whose accuracy is measured.
        embeddings: see `hide_members`.
        fitted: numbers of images that are left out, because the heads were computed from them.
    """
    counts = {strength: torch.zeros(3, 2).double() for strength in heads}  # right, labelled, agreeing × without, with
    images = 0
    for shard, has in members.read_stored(store):
        free = ~torch.isin(shard.numbers.long(), torch.tensor(list(fitted), dtype=torch.long))
        points, labels, has = shard.embeddings[free].to(edit.mean), shard.labels[free].long(), has[free].long()
        before = edit.target.classify(points).argmax(-1).cpu()
        images += len(points)
        for strength, head in heads.items():
            after = head(points).argmax(-1).cpu()
            for row, each in enumerate((after == labels, labels >= 0, after == before)):
                counts[strength][row] += has.bincount(each.double(), minlength=2)
    return tuple(
        Price(
            strength,
            sum(
                measure_reliance(*(edit.score(head.weight, points, of) for points in embeddings)) for of in edit.classes
            )
            / len(edit.classes),
            (counts[strength][2].sum() / images).item(),
            *(find_share(*counts[strength][:2, chosen].sum(-1)) for chosen in ([0, 1], [1], [0])),
        )
        for strength, head in heads.items()
    )
