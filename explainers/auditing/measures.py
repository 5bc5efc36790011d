"""The groups of an audit: their numbers, what hiding them does, and how suspicious they are."""

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from explainers.auditing.audit import Example, Group
from explainers.auditing.groups import Centres, Store
from explainers.auditing.hiding import PASSES, Hiding, Photos, hide
from explainers.auditing.suspicion import Usual, suspect
from explainers.auditing.tally import Candidate, OnObject, Tally, find_share, find_sources, share_places, tally
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.runtime.progress import show_passes


def measure_groups(
    store: Store,
    target: TargetModel,
    grid: PatchGrid,
    centres: Centres,
    names: Sequence[str],
    classes: Sequence[str],
    photos: Photos,
    *,
    hidden: int = 32,
    passes: int = 20_000,
    on_object: OnObject | None = None,
) -> tuple[list[Group], Centres]:
    """Measure all groups, in one pass over the shards and at most `passes` forward passes.

    Args:
        store: evidence of all images.
        target: the model.
        grid: its patches.
        centres: the groups, see `find_groups`.
        names: file of each photo, relative to the folder; `cat/flickr/1.jpg` has the source flickr.
        classes: names of the classes, for reasons.
        photos: reads photos, whose patches are hidden.
        hidden: number of images of each group whose patches are hidden; 0 for none.
        passes: if all groups need more forward passes, those that are the most suspicious without hiding are measured.
        on_object: which patches lie on the object, such as `inside_masks`; `None` if it is not known.

    Returns:
        The groups, the most suspicious first, and their centres in this order.
    """
    sums = tally(store, target, centres, grid.num_patches, on_object, find_sources(names), hidden)
    groups = [describe_group(sums, index, grid, names) for index in range(len(centres.classes))]
    usual = [find_usual(sums, index, grid) for index in range(len(groups))]
    groups = [_with_suspicion(group, usual[group.index], None, classes) for group in groups]
    order = sorted(range(len(groups)), key=lambda index: -groups[index].suspicion)
    chosen = [index for index in order if len(sums.drawn[index]) > 1]
    most = max(passes // (PASSES * hidden), 1) if hidden else 0
    if len(chosen) > most:
        print(f"hidden: {most} of {len(groups)} groups, for at most {passes:,} passes", file=sys.stderr)
    with show_passes("hiding groups", sum(PASSES * len(sums.drawn[index]) for index in chosen[:most])):
        for index in chosen[:most]:
            found = hide_group(target, grid, sums.drawn[index], photos, groups[index].class_index)
            groups[index] = _with_suspicion(groups[index], usual[index], found, classes)
    order = sorted(range(len(groups)), key=lambda index: (not groups[index].is_alarm, -groups[index].suspicion))
    return [replace(groups[old], index=new) for new, old in enumerate(order)], centres.select(order)


def describe_group(sums: Tally, index: int, grid: PatchGrid, names: Sequence[str]) -> Group:
    """Turn sums into the numbers of a group, by its place among the centres, without hiding and suspicion."""
    of = int(sums.centres.classes[index])
    patches = sums.positions[index].sum().clamp(min=1)
    positions = sums.positions[index] / patches
    labelled, right = sums.labelled[of] - sums.labelled_with[index], sums.right[of] - sums.right_with[index]
    sources = sums.sources[index]
    return Group(
        index=index,
        class_index=of,
        share=find_share(sums.evidence[index], sums.totals[of]) or 0.0,
        images=int(sums.images[index]),
        image_share=find_share(sums.images[index], sums.predicted[of]) or 0.0,
        accuracy_with=find_share(sums.right_with[index], sums.labelled_with[index]),
        accuracy_without=find_share(right, labelled),
        exclusive=(sums.own[index] / patches).item(),
        positions=tuple(map(tuple, positions.view(grid.shape).tolist())),
        places=share_places(positions, grid),
        hidden=None,
        random=None,
        flipped=None,
        off_object=(sums.outside[index] / patches).item() if sums.knows_object else None,
        sources=max(sources.values()) / sources.total() if sources else None,
        suspicion=0.0,
        reasons=(),
        examples=tuple(_example(each, names) for each in sums.examples[index]),
        without=tuple(_example(each, names) for each in sums.without[index]),
        images_without=int(labelled),
    )


def hide_group(
    target: TargetModel,
    grid: PatchGrid,
    drawn: Sequence[Candidate],
    photos: Photos,
    predicted: int,
) -> Hiding | None:
    """Hide the patches of a group, see `hide`; `None` if fewer than 2 images can be read."""
    images, numbers = photos([each.number for each in drawn])
    if len(numbers) < 2:
        return None
    gone = torch.zeros(len(numbers), grid.num_patches, dtype=torch.bool)
    patches = {each.number: list(each.patches) for each in drawn}
    for row, number in zip(gone, numbers, strict=True):
        row[patches[number]] = True
    return hide(target, grid, images, torch.tensor(numbers), gone, predicted)


def find_usual(sums: Tally, index: int, grid: PatchGrid) -> Usual:
    """What is usual in the images of a group, for all groups and for its class."""
    positions = sums.positions.sum(0)
    of_class, of_group = sums.class_sources[int(sums.centres.classes[index])], sums.sources[index]
    most = of_class[of_group.most_common(1)[0][0]] / of_class.total() if of_group else 0.0
    return Usual(share_places(positions / positions.sum(), grid).get("centre", 0.0), most)


def _with_suspicion(group: Group, usual: Usual, found: Hiding | None, classes: Sequence[str]) -> Group:
    if found is not None:
        group = replace(group, hidden=found.hidden, random=found.random, flipped=found.flipped)
    difference = None if found is None else found.difference
    suspicion, reasons = suspect(group, classes[group.class_index], difference, usual)
    return replace(group, suspicion=suspicion, reasons=reasons)


def _example(found: Candidate, names: Sequence[str]) -> Example:
    label = None if found.label < 0 else found.label
    return Example(found.number, names[found.number], label, found.predicted, found.patches)
