"""What do ImageNet models rely on beside the object? Findings in Imagenette that nobody planted, checked by hiding.

    python benchmarks/audit_findings.py --data ../data --store /tmp/findings --output docs/results/audits/findings.json

Groups of evidence are those of ViT-Tiny with the shipped AnyHead, in 150 training photos of each class. A person looked
at their crops and wrote `FINDINGS`. `hidden` is the loss of log-odds of the class when the patches of a group are
hidden, `random` that for as many others of the same photos. `moved` is the gain when the patches are moved into photos
of other classes, `same places` that for patches at the same places of photos of the class that lack the group. Errors
are standard errors over photos. DeiT-Tiny sees the same photos; nobody looked at its evidence.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

import explainers
from benchmarks.any_model import load_model
from explainers.auditing.evidence import Evidence, functionals
from explainers.auditing.groups import Centres, assign, find_groups
from explainers.auditing.hiding import hide, measure_effect
from explainers.auditing.store import EvidenceStore, Source
from explainers.auditing.tally import PRESENT
from explainers.masking import PatchGrid
from explainers.models import TargetModel, as_target
from explainers.models.scores import log_odds
from explainers.saved.files import atomic
from explainers.training.trunk import decompose_all

CLASSES = {
    "n01440764": 0,
    "n02102040": 217,
    "n02979186": 482,
    "n03000684": 491,
    "n03028079": 497,
    "n03394916": 566,
    "n03417042": 569,
    "n03425413": 571,
    "n03445777": 574,
    "n03888257": 701,
}
"""Folders of Imagenette → their classes of ImageNet."""
FIRST, GROUPS, HIDDEN = 150, 10, 24
"""Photos of each class, groups of each class, and photos of a group in which it is hidden."""
MODELS = {"ViT-Tiny": "vit_tiny_patch16_224", "DeiT-Tiny": "deit_tiny_patch16_224"}


class Finding(NamedTuple):
    """A group that shows something else than the object, named by one of its patches.

    Args:
        file: a photo.
        patch: a patch of the group in it.
        shows: what a person sees.
        rare: measure it on all other training photos of the class, because few of the first have it.
    """

    file: str
    patch: int
    shows: str
    rare: bool = False


FINDINGS = (
    Finding("n03417042/n03417042_1029.JPEG", 185, "garbage truck: the watermark of a web site about cars", True),
    Finding("n01440764/n01440764_10543.JPEG", 49, "tench: who holds it, faces, hands and clothes"),
    Finding("n03000684/n03000684_10533.JPEG", 103, "chain saw: who works with it, legs, helmets and jackets"),
    Finding("n03445777/n03445777_11483.JPEG", 103, "golf ball: tees, sticks and legs"),
    Finding("n03445777/n03445777_10689.JPEG", 13, "golf ball: corners of photos, whatever they show"),
)


class Photos:
    """A part of the photos of some classes, by their numbers."""

    def __init__(self, root: Path, folders: Iterable[str], part: slice, target: TargetModel) -> None:
        self.files = [file for folder in folders for file in sorted((root / folder).iterdir())[part]]
        self.names = [f"{file.parent.name}/{file.name}" for file in self.files]
        self.transform = target.transform

    def __call__(self, numbers: Sequence[int]) -> Tensor:
        """Read photos as uint8 images (B, 3, H, W)."""
        return torch.stack([self.transform(Image.open(self.files[number]).convert("RGB")) for number in numbers])

    def batches(self, numbers: range) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """Read photos for an `EvidenceStore`."""
        for start in range(0, len(numbers), 20):
            yield self(numbers[start : start + 20]), numbers[start : start + 20]


def collect(explainer: Any, photos: Photos, folder: Path) -> tuple[EvidenceStore, Evidence]:
    """Take the evidence of photos, once; the store, and all of it."""
    store = EvidenceStore(folder, 250)
    labels = [CLASSES[file.parent.name] for file in photos.files]
    store.collect(explainer, Source(photos.names, labels, photos.files, photos.batches))
    shards = list(store.shards())
    return store, Evidence(*(torch.cat([getattr(each, field.name) for each in shards]) for field in fields(Evidence)))


def build(data: Path) -> Any:
    """The shipped AnyHead of ViT-Tiny, whose vectors are computed with bf16."""
    target = as_target(load_model(data, MODELS["ViT-Tiny"])).float().eval()
    explainer = explainers.load(f"{MODELS['ViT-Tiny']}.augreg_in21k_ft_in1k", target=target)

    def in_bfloat16(images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            vectors, embeddings = explainer.decompose(images)
        return vectors.float(), embeddings.float()

    explainer.decompose_lazily = lambda images: decompose_all(*in_bfloat16(images))
    return explainer


def measure(
    of: int,
    group: int,
    centres: Centres,
    grid: PatchGrid,
    targets: dict[str, TargetModel],
    photos: Photos,
    evidence: Evidence,
    strangers: Tensor,
) -> dict[str, Any]:
    """Measure a group of a class on photos with this label, and on `HIDDEN` images of other classes, `strangers`."""
    inside, own = assign(evidence, centres) == group, evidence.predicted == of
    has = inside.sum(1) >= PRESENT
    v = functionals(targets["ViT-Tiny"], evidence.embeddings[:1].float(), torch.tensor([of]))[0]
    amounts = (evidence.vectors.float() @ v).clamp(min=0)
    found: dict[str, Any] = {
        "predicted": int(own.sum()),
        "with_group": int((has & own).sum()),
        "evidence": float((amounts * inside)[own].sum() / evidence.totals[own].sum()),
        "mistakes": int((~own).sum()),
        "mistakes_with_group": int((~own & has).sum()),
        "accuracy_with": float(own[has].float().mean()),
        "accuracy_without": float(own[~has].float().mean()),
    }
    rows = (has & own).nonzero()[:, 0][:HIDDEN]
    lacking = (~has & own).nonzero()[:, 0][:HIDDEN]
    gone = torch.zeros(len(rows), grid.num_patches, dtype=torch.bool)
    for each, row in enumerate(rows.tolist()):
        gone[each, evidence.patches[row][inside[row]].long()] = True
    images, control = (photos(evidence.numbers[some].tolist()) for some in (rows, lacking))
    control = control[torch.arange(len(rows)) % len(control)]
    for name, model in targets.items():
        found[name] = asdict(hide(model, grid, images, evidence.numbers[rows], gone, of))
        found[name]["moved"] = move(model, grid, gone, strangers[: len(rows)], (images, control), of)
    del found["DeiT-Tiny"]["flipped"]  # which would be of photos of which it may predict another class anyway
    return found | {"patches": float(gone.sum(1).float().mean())}


@torch.no_grad()
def move(
    target: TargetModel, grid: PatchGrid, patches: Tensor, receivers: Tensor, donors: tuple[Tensor, Tensor], of: int
) -> dict[str, Any]:
    """Move patches (B, N) of two donors of each receiver, uint8 (B, 3, H, W), into it: gains of log-odds of a class."""
    pixels = patches.unflatten(1, (1, *grid.shape))
    pixels = pixels.repeat_interleave(grid.patch_size, 2).repeat_interleave(grid.patch_size, 3)

    def odds(images: Tensor) -> Tensor:
        logits = target.classify(target.embed(target.normalise(images)))
        return log_odds(logits, torch.full((len(images),), of), target.score).double()

    before, *after = (odds(each) for each in (receivers, *(torch.where(pixels, donor, receivers) for donor in donors)))
    gains = {"group": after[0] - before, "same_places": after[1] - before, "difference": after[0] - after[1]}
    return {name: asdict(measure_effect(gain)) for name, gain in gains.items()}


def tabulate(found: Sequence[dict[str, Any]]) -> str:
    """Write a row for each finding and model."""
    titles = "Class and group", "Photos", "Evidence", "Model", "Hidden", "Random", "Flipped", "Moved", "Same places"
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for each in found:
        start = f"{each['shows']} | {each['with_group']} of {each['predicted']} | {each['evidence']:.1%}"
        for model in MODELS:
            own, moved = each[model], each[model]["moved"]
            effects = own["hidden"], own["random"], moved["group"], moved["same_places"]
            cells = [f"{effect['mean']:.2f} ± {effect['error']:.2f}" for effect in effects]
            cells.insert(2, f"{own['flipped']:.0%}" if "flipped" in own else "")
            lines.append(f"| {start} | {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What do ImageNet models rely on beside the object?")
    parser.add_argument("--data", type=Path, required=True, help="folder of imagenette and weights")
    parser.add_argument("--store", type=Path, required=True, help="folder for evidence")
    parser.add_argument("--output", type=Path, required=True, help="file of results")
    options = parser.parse_args(arguments)
    explainer = build(options.data)
    root, target = options.data / "imagenette" / "train", explainer.target
    first = Photos(root, CLASSES, slice(FIRST), target)
    store, evidence = collect(explainer, first, options.store / "ViT-Tiny train")
    centres, found = find_groups(store, target, GROUPS), []
    targets = {"ViT-Tiny": target, "DeiT-Tiny": as_target(load_model(options.data, MODELS["DeiT-Tiny"])).float().eval()}
    for finding in FINDINGS:
        folder = finding.file.partition("/")[0]
        of, row = CLASSES[folder], evidence.numbers.tolist().index(first.names.index(finding.file))
        place = evidence.patches[row].tolist().index(finding.patch)
        group = int(assign(evidence, centres)[row, place])
        others = (evidence.labels != of).nonzero()[:, 0]
        strangers = first(evidence.numbers[others[:: len(others) // HIDDEN][:HIDDEN]].tolist())
        photos, own = (
            first,
            Evidence(*(getattr(evidence, each.name)[evidence.labels == of] for each in fields(Evidence))),
        )
        if finding.rare:
            photos = Photos(root, [folder], slice(FIRST, None), target)
            own = collect(explainer, photos, options.store / folder)[1]
        measured = measure(of, group, centres, explainer.grid, targets, photos, own, strangers)
        found.append(finding._asdict() | measured)
        with atomic(options.output) as path:
            path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(tabulate(found))


if __name__ == "__main__":
    main()
