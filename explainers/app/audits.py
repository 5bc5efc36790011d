"""What a model relies on in all images of a folder: `explainers.audit(folder, model)`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from explainers import VectorExplainer
from explainers.app.audited_photos import (
    Labels,
    Masks,
    Pictures,
    find_labels,
    find_objects,
    list_folder,
    make_source,
    recall_photos,
)
from explainers.app.choosing import Method, print_once
from explainers.app.photos import Photo
from explainers.app.session import Session
from explainers.auditing.audit import Audit
from explainers.auditing.evidence import check_classes
from explainers.auditing.groups import compare_groups, find_groups
from explainers.auditing.measures import measure_groups
from explainers.auditing.repair import Repair, repair
from explainers.auditing.report_card import ReportCard, grade_heads
from explainers.auditing.store import EvidenceStore, describe_explainer, process_number
from explainers.auditing.tally import inside_masks
from explainers.errors import InputError, check_integers, check_positive
from explainers.models import as_target
from explainers.models.names import class_names
from explainers.report.audit_page import PAGE, audit_html, load_audit
from explainers.saved.files import write_atomically
from explainers.saved.identity import Identity
from explainers.saved.records import devices, versions
from explainers.saved.weights import name_difference

PASSES = 20_000
"""Forward passes that hide patches: some minutes of a small model on a processor."""

VECTORS = "AnyHead, DirectPaths or PathFlow for a ViT, or CAM for a CNN"


@dataclass
class FolderAudit(Audit):
    """An audit of a folder, with what can repair its model: the session, the photos and the evidence of them."""

    session: Session = field(repr=False, compare=False)
    photos: list[Photo] = field(repr=False, compare=False)
    store: EvidenceStore = field(repr=False, compare=False)

    def without(self, groups: Sequence[int], strength: float | None = None) -> Repair:
        """Make a head that relies less on groups, by their numbers, see `repair`; `save` of it writes the head."""
        pictures = Pictures(self.session, self.photos, self.store.stamps())
        with self.session.computing():
            found = repair(self.store, self.session.explainer, self.centres, groups, pictures.read, strength=strength)
        pictures.name_lost()
        return found

    def name_groups(self, texts: Sequence[str]) -> None:
        """Give groups the similarity of their direction to texts, the most similar first, and write the audit again."""
        head = self.session.text_head
        scores = head(self.centres.directions.to(head.device), texts).float().cpu()
        order = scores.argsort(1, descending=True).tolist()
        self.groups = [
            replace(group, texts={texts[text]: row[text].item() for text in places})
            for group, row, places in zip(self.groups, scores, order, strict=True)
        ]
        self.write(Pictures(self.session, self.photos, self.store.stamps()))

    def write(self, pictures: Pictures) -> None:
        """Write numbers and page to the folder of the evidence."""
        folder = self.store.folder.parent
        page, file = audit_html(self, pictures), folder / PAGE
        pictures.name_lost()
        self.store.check()  # another audit may have started with the same folder
        file.unlink(missing_ok=True)  # so that no old page stays beside new numbers
        self.save(folder)
        write_atomically(file, page)

    def report_card(self, repaired: Repair) -> ReportCard:
        """Compare a repaired head with the model's own on all images, see `grade_heads`; it prints as a table."""
        with self.session.computing():
            card = grade_heads(self.store, self.session.target, repaired.head, self.centres, repaired.groups)
        return replace(card, names=tuple(self.classes))


def audit(
    folder: str | Path,
    model: str | nn.Module,
    *,
    method: Method = "auto",
    labels: Labels = None,
    output: str | Path = "audit",
    masks: Masks | None = None,
    groups: int | None = None,
    passes: int = PASSES,
) -> FolderAudit:
    """Find what a classifier relies on over a folder of images: groups of patches that are evidence for its classes.

    One pass for each image, then some passes with hidden patches for each group. The same call continues after a kill.
    Started by torchrun or SLURM, processes share the images; all but the first then end.

    Args:
        folder: the images, with all folders below it. Broken files are left out with a warning.
        model: see `explain`; of a head that is not the model's own, `as_target(model, head=...)`.
        method: an explainer with vectors of patches. `auto` takes a trained one if it is shipped for this backbone, or
            else one without training, see `explain`.
        labels: see `Labels`. Of a folder of classes, the first folder below `folder` is the class of an image, named as
            the model names it, or by its wnid; without names of the model, folders are in the order of its logits.
            `None`: not known; then accuracies are `None`.
        output: a folder for this audit: its evidence, `results.json`, and `audit.html`, the page.
        masks: masks of the objects, see `Masks`.
        groups: number of groups of each class; `None` chooses it.
        passes: about the largest number of forward passes that hide patches, of the most suspicious groups first.

    Returns:
        The groups, the most suspicious first. `audit.without([3, 7])` makes a head that relies less on two of them, and
        `audit.name_groups(texts)` names them, with a model of CLIP or SigLIP.

    Raises:
        InputError: for a folder without images, what the model cannot classify or the method cannot explain, and an
            `output` that holds another audit.
    """
    check_integers(passes=passes, groups=1 if groups is None else groups)
    check_positive(passes=passes)
    session = start_session(model, method)
    command = ["explainers", "audit", str(folder), "--model", session.target.name, "--output", str(output)]
    return audit_folder(session, folder, labels, output, masks, groups, passes, command)


def start_session(model: str | nn.Module, method: Method, batch_size: int | None = None) -> Session:
    """A `Session` with an explainer that has vectors, on a GPU of this process; an InputError if it has none."""
    rank, processes = process_number()
    if processes > 1 and torch.cuda.device_count() > 1:
        target = as_target(model)
        if isinstance(model, str) or target.mean.is_cuda:
            model = as_target(target, device=f"cuda:{rank % torch.cuda.device_count()}")
    session = Session(model, method, None, "likeness", batch_size)
    check_classes(session.target)
    if not isinstance(session.explainer, VectorExplainer):
        raise InputError(
            f"method {session.method}: expected an explainer with vectors of patches, which an audit needs: take"
            f" {VECTORS}"
        )
    return session


def audit_folder(
    session: Session,
    folder: str | Path,
    labels: Labels = None,
    output: str | Path = "audit",
    masks: Masks | None = None,
    groups: int | None = None,
    passes: int = PASSES,
    command: Sequence[str] = (),
) -> FolderAudit:
    """Audit the model of a session from `start_session`, with the arguments of `audit`; `command` repeats this."""
    if Path(output).is_file():
        raise InputError(f"output: expected a folder, got the file {output}: give another one", "output")
    store, listed = EvidenceStore(output), list_folder(folder)
    photos, labels_of = recall_photos(folder, listed, find_labels(labels, listed, session.target), store.listing())
    names, classes = [photo.name for photo in photos], class_names(session.target)
    source = make_source(session, photos, labels_of)
    explainer: Any = session.explainer
    grid = explainer.grid
    objects = find_objects(masks, photos, session, grid) if masks else None
    print_once(f"{session.target.name}: evidence by {session.method}")
    with session.computing():
        if not store.collect(explainer, source):
            print(f"process {process_number()[0]}: its evidence is in {output}; process 0 goes on", file=sys.stderr)
            sys.exit()
        pictures = Pictures(session, photos, store.stamps())
        centres, others = (find_groups(store, session.target, groups, seed=seed) for seed in (0, 1))
        stability = compare_groups(next(store.shards()), centres, others)
        on_object = None if objects is None else inside_masks(objects)
        of_images = store, session.target, grid, centres, names, classes, pictures.read
        found, centres = measure_groups(*of_images, passes=passes, on_object=on_object)
    about = {
        "command": list(command),
        "explainer": session.method,
        "model": session.target.timm_name,
        "transform": asdict(session.transform),
        "identity": store.identity(),
        "packages": versions(),
        "devices": devices(),
    }
    numbers = count_images(store) | {"stability": stability}
    audit = FolderAudit(found, classes, numbers, grid.shape, about, centres, session, photos, store)
    audit.write(pictures)
    return audit


def open_audit(session: Session, folder: str | Path, output: str | Path) -> FolderAudit:
    """Open the audit of a folder that `audit_folder` wrote to `output`; an InputError if it is of something else."""
    audit, store, listed = load_audit(output), EvidenceStore(output), list_folder(folder)
    stored = store.listing()
    labels = torch.tensor([stored.get(photo.name, -1) for photo in listed])
    photos, labels = recall_photos(folder, listed, labels, stored)
    own: Identity = {
        "target": session.target.identity(),
        "explainer": describe_explainer(session.explainer),
        "images": make_source(session, photos, labels).identity(),
    }
    for saved in (store.identity(), audit.about["identity"]):
        difference = name_difference(saved, json.loads(json.dumps(own)))
        if difference is not None:
            raise InputError(f"{output} holds another audit, which differs in {difference}: repeat its command")
    return FolderAudit(**vars(audit), session=session, photos=photos, store=store)


def count_images(store: EvidenceStore) -> dict[str, Any]:
    """Count images, those that are predicted right, stored patches and bytes, see `Audit`."""
    images = labelled = right = patches = 0
    for shard in store.shards():
        images += len(shard.numbers)
        labelled += int((shard.labels >= 0).sum())
        right += int((shard.labels == shard.predicted).sum())
        patches = shard.patches.shape[1]
    size = sum(file.stat().st_size for file in store.folder.iterdir())
    return {"images": images, "accuracy": right / labelled if labelled else None, "patches": patches, "bytes": size}
