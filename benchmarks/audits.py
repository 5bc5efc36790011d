"""Does an audit find planted faults, and does its repair take them out? Cats and dogs, whose class a fault betrays.

    python benchmarks/audits.py --data ../data --store /tmp/audits --output docs/results/audits
    python benchmarks/audits.py ... --backbones ViT-Tiny --faults background --correlations 50 80 95 100

In c per cent of the photos of each class, the variant agrees with the class: cats on churches and dogs on petrol
stations, or cats with the watermark and dogs without. At 50 % it tells nothing; nothing is planted in the null cases.
A logistic head is fitted to frozen embeddings of such photos, and others, planted alike, are audited. Masks only judge.
All methods have the groups of the audit to spend, as many for each class. Standard errors are over draws.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

from benchmarks.audit_images import BACKBONES, POOL, TEST, VARIANTS, build, load_variant
from explainers import posthoc
from explainers.auditing.audit import SUSPICIOUS, Group
from explainers.auditing.evidence import Evidence, take_evidence
from explainers.auditing.groups import Centres, assign, find_groups
from explainers.auditing.measures import measure_groups
from explainers.auditing.repair import STRENGTHS, repair
from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.saved.files import atomic

FIT, AUDIT, FEW = 260, 240, 40
"""Photos to which a head is fitted, that are audited, and to which DFR refits the head."""
PLANTED = 1 / 3
"""A patch is planted if the fault covers more of it; a group if more than half of its patches are."""
JUDGED = ("groups", "rank", "purity", "recall", "area")
STRONGEST, HIDDEN = 40, 12
"""Patches of a photo that are stored, and photos of a group in which it is hidden."""
NULL = {"clean": 2, "pasted": 2, "imagenette": 10}
"""Photos without a fault, and their number of classes."""


class Found(NamedTuple):
    """Groups of patches of audited photos, as any method finds them.

    Args:
        patches: numbers of patches of each photo, (B, P).
        members: the group of each, (B, P).
        scores: of the groups, (G,); the highest is to be looked at first.
    """

    patches: Tensor
    members: Tensor
    scores: Tensor


class Draw(NamedTuple):
    """Photos of one draw, and the variant of every photo of the pool: 0 is that of cats."""

    fit: Tensor
    audit: Tensor
    rest: Tensor
    variants: Tensor


def draw_photos(correlation: float, seed: int) -> Draw:
    """Draw photos; the variant agrees with the class in exactly this share of each class to fit, and to audit."""
    order = torch.randperm(POOL, generator=torch.Generator().manual_seed(seed))
    fit, audit, rest = order.split([FIT, AUDIT, POOL - FIT - AUDIT])
    variants = torch.zeros(POOL, dtype=torch.long)
    for part in (fit, audit, rest):
        for label in (0, 1):
            members = part[part % 2 == label]
            agreeing = torch.arange(len(members)) < round(correlation * len(members))
            variants[members] = torch.where(agreeing, label, 1 - label)
    return Draw(fit, audit, rest, variants)


def fit_head(embeddings: Tensor, labels: Tensor) -> nn.Linear:
    """Fit logistic regression to embeddings (B, D), of unit variance on the whole."""
    from sklearn.linear_model import LogisticRegression

    scale = embeddings.float().std()
    fitted = LogisticRegression(max_iter=5000).fit((embeddings.float() / scale).numpy(), labels.numpy())
    head = nn.Linear(embeddings.shape[1], int(labels.max()) + 1).requires_grad_(False)
    rows, bias = torch.from_numpy(fitted.coef_).float(), torch.from_numpy(fitted.intercept_).float()
    head.weight[:] = (torch.cat([-rows, rows]) / 2 if len(rows) == 1 else rows) / scale
    head.bias[:] = torch.cat([-bias, bias]) / 2 if len(bias) == 1 else bias
    return head


def accuracies(head: nn.Module, embeddings: Tensor) -> dict[str, float]:
    """Accuracy on photos of the test whose variant agrees with the class, and on the same photos with the other one.

    Embeddings are of both variants of all photos, (2, M, D).
    """
    rows = torch.arange(POOL, POOL + TEST)
    found = {}
    for name, variants in (("same", rows % 2), ("swapped", 1 - rows % 2)):
        right = head(embeddings[variants, rows].float()).argmax(-1) == rows % 2
        found[name] = right.float().mean().item()
    return found


class InBFloat16(TargetModel):
    """A model that embeds with bf16."""

    def embed(self, normalised: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().embed(normalised).float()


class Audited:
    """Photos whose vectors were computed before: their explainer, which knows them by their pixels, and their store."""

    def __init__(self, target: TargetModel, both: dict[str, Tensor], rows: Tensor, variants: Tensor) -> None:
        self.target, self.grid = target, target.grid
        self.stored = {name: values[variants, rows] for name, values in both.items()}
        self.places = {hash(image.numpy().tobytes()): place for place, image in enumerate(self.stored["images"])}
        self.labels = rows % target.num_classes
        self.evidence = take_evidence(self, self.stored["images"], self.labels, STRONGEST)

    def decompose(self, images: Tensor) -> tuple[Tensor, Tensor]:
        places = [self.places[hash(image.numpy().tobytes())] for image in images]
        return self.stored["vectors"][places].float(), self.stored["embeddings"][places].float()

    def read(self, numbers: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        return self.stored["images"][list(numbers)], numbers

    def shards(self) -> Iterator[Evidence]:
        yield self.evidence

    def audit(self) -> tuple[list[Group], Centres]:
        """The groups, measured with masked passes, and their centres."""
        classes = [str(label) for label in range(self.target.num_classes)]
        names = [f"{label}/{place}" for place, label in enumerate(self.labels.tolist())]
        found = self, self.target, self.grid, find_groups(self, self.target), names, classes, self.read
        return measure_groups(*found, hidden=HIDDEN)

    def centre(self, found: Found) -> Centres:
        """Directions of groups that another method found: the mean of the unit vectors of their patches."""
        vectors = F.normalize(self.stored["vectors"].float(), dim=-1).take_along_dim(found.patches[..., None], 1)
        sums = torch.zeros(len(found.scores), vectors.shape[-1])
        sums.index_add_(0, found.members.flatten(), vectors.flatten(0, 1))
        classes = torch.zeros(len(found.scores), dtype=torch.long)
        classes[found.members] = self.evidence.predicted[:, None].expand_as(found.members)
        return Centres(F.normalize(sums, dim=-1), classes)

    def repair(self, centres: Centres, groups: Sequence[int], strength: float | None = None) -> tuple[nn.Module, float]:
        """The head without groups, and the strength; as it was, and 0, if there are none, or no strength betters it."""
        with suppress(InputError):
            found = repair(self, self, centres, groups, self.read, strength=strength)
            return found.head, found.strength
        return self.target.head, 0.0


def judge(found: Found, shares: Tensor) -> dict[str, Any]:
    """Compare groups with the masks.

    Args:
        found: the groups.
        shares: of every patch of the audited photos, how much of it is the fault, (B, N).

    Returns:
        `groups`; `planted`: those most of whose patches are; `rank` of the first of these, from 1, `None` without any;
        `purity`: mean over patches of the larger of the shares, planted or not, of its group; `recall`: share of
        planted patches in planted groups; `area` under the ROC of scores against planted groups, `None` if all or none
        are.
    """
    from sklearn.metrics import roc_auc_score

    truth, groups = (shares.gather(1, found.patches) > PLANTED).double(), len(found.scores)
    sizes = found.members.flatten().bincount(minlength=groups)
    hits = found.members.flatten().bincount(truth.flatten(), minlength=groups)
    planted = hits > sizes / 2
    ranks = found.scores.argsort(descending=True, stable=True).argsort() + 1
    mixed = bool(planted.any()) and not bool(planted.all())
    return {
        "groups": groups,
        "planted": planted.nonzero()[:, 0].tolist(),
        "shares": (hits / sizes.clamp(min=1)).tolist(),
        "rank": int(ranks[planted].min()) if planted.any() else None,
        "purity": float(torch.maximum(hits, sizes - hits).sum() / sizes.sum()),
        "recall": float(hits[planted].sum() / hits.sum()) if hits.sum() else None,
        "area": float(roc_auc_score(planted.numpy(), found.scores.numpy())) if mixed else None,
    }


def cluster_heatmaps(heatmaps: Tensor, predicted: Tensor, counts: Sequence[int]) -> Found:
    """SpRAy: spectral clusters of the heatmaps (B, N) of each class; those that stand apart first, by silhouette."""
    from sklearn.cluster import SpectralClustering
    from sklearn.metrics import silhouette_samples

    patches = heatmaps.topk(STRONGEST).indices
    points = F.avg_pool2d(heatmaps.unflatten(1, (1, 14, 14)), 2).flatten(1)
    members, scores, first = torch.zeros_like(patches), [], 0
    for label, count in enumerate(counts):
        rows = (predicted == label).nonzero()[:, 0]
        own = F.normalize(points[rows], dim=-1).numpy()
        cut = SpectralClustering(count, affinity="nearest_neighbors", n_neighbors=10, random_state=0)
        clusters = torch.from_numpy(cut.fit_predict(own)).long()
        apart = torch.from_numpy(silhouette_samples(own, clusters.numpy()))
        scores += [apart[clusters == cluster].mean() for cluster in range(count)]
        members[rows] = (first + clusters)[:, None]
        first += count
    return Found(patches, members, torch.stack(scores).nan_to_num(-1.0))


def factorise(activations: Tensor, rows: Tensor, predicted: Tensor, counts: Sequence[int]) -> Found:
    """CRAFT on feature maps: NMF of the activations (B, N, D) of each class; the most important concepts first.

    The importance is the mean of what a concept adds to W_y − W_k, rows (K, D) of a head of two classes; for a linear
    head it orders as Sobol indices do. Activations are cut off at 0, as by CRAFT.
    """
    from sklearn.decomposition import NMF

    patches = torch.zeros(len(activations), STRONGEST, dtype=torch.long)
    members, scores, first = torch.zeros_like(patches), [], 0
    if activations.shape[1] < 14 * 14:  # the 7 × 7 positions of a CNN, each for four patches
        activations = activations.unflatten(1, (7, 7)).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2)
    for label, count in enumerate(counts):
        own = (predicted == label).nonzero()[:, 0]
        v = rows[label] - rows[1 - label]
        positive = activations[own].clamp(min=0).float()
        model = NMF(count, init="nndsvda", max_iter=300, tol=1e-3, random_state=0)
        model.fit(positive[::3].flatten(0, 1).numpy())
        amounts = torch.from_numpy(model.transform(positive.flatten(0, 1).numpy())).float()
        effects = torch.from_numpy(model.components_).float() @ v
        parts = (amounts * effects).unflatten(0, positive.shape[:2])  # (b, N, count): what each concept adds
        patches[own] = parts.clamp(min=0).sum(-1).topk(STRONGEST).indices
        members[own] = first + parts.argmax(-1).gather(1, patches[own])
        scores += [*parts.mean((0, 1))]
        first += count
    return Found(patches, members, torch.stack(scores))


def measure(
    backbone: str, target: TargetModel, both: dict[str, Tensor], correlation: float, seed: int, peers: bool
) -> dict[str, Any]:
    """All numbers of one draw."""
    drawn, balanced = draw_photos(correlation, seed), draw_photos(0.5, seed)
    embeddings = both["embeddings"]

    def fit_on(photos: Tensor, of: Tensor) -> nn.Linear:
        return fit_head(embeddings[of[photos], photos], photos % 2)

    target.head = fit_on(drawn.fit, drawn.variants)
    photos = Audited(target, both, drawn.audit, drawn.variants[drawn.audit])
    groups, centres = photos.audit()
    suspicions = torch.tensor([group.suspicion for group in groups])
    methods = {"audit": Found(photos.evidence.patches.long(), assign(photos.evidence, centres), suspicions)}
    if peers:
        counts, predicted = centres.classes.bincount(minlength=2).tolist(), photos.evidence.predicted
        methods["SpRAy"] = cluster_heatmaps(explain(backbone, photos), predicted, counts)
        methods["NMF"] = factorise(photos.stored["activations"], target.head.weight, predicted, counts)
    judged = {name: judge(found, photos.stored["shares"]) for name, found in methods.items()}
    planted = judged["audit"]["planted"]
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    chance = [group for group in order if group not in planted][: len(planted)]
    repaired, strength = photos.repair(centres, planted)
    heads = {
        "before": target.head,
        "without planted groups": repaired,
        "without suspicious groups": photos.repair(centres, (suspicions >= SUSPICIOUS).nonzero()[:, 0].tolist())[0],
        "without random other groups": photos.repair(centres, chance, strength or 1.0)[0],
    }
    for name in [*methods][1:]:
        own = photos.repair(photos.centre(methods[name]), judged[name]["planted"], strength or 1.0)
        heads[f"without planted groups of {name}"] = own[0]
    heads["DFR"] = fit_on(balanced.rest[:: len(balanced.rest) // FEW], balanced.variants)
    heads["balanced"] = fit_on(balanced.fit, balanced.variants)
    heads |= {f"strength {each:g}": photos.repair(centres, planted, each)[0] for each in STRENGTHS}
    return {
        "groups": judged,
        "strength": strength,
        "accuracy": {name: accuracies(head, embeddings) for name, head in heads.items()},
        "suspicion": [summarise(group) for group in groups],
    }


def summarise(group: Group) -> dict[str, Any]:
    """What the suspicion of a group follows from."""
    names = (
        "class_index",
        "suspicion",
        "share",
        "image_share",
        "accuracy_with",
        "accuracy_without",
        "places",
        "reasons",
    )
    return {name: getattr(group, name) for name in names}


def explain(backbone: str, photos: Audited) -> Tensor:
    """Heatmaps of the predicted classes, (B, N): GAE of a transformer, and CAM of a CNN."""
    target, classes, stored = photos.target, photos.evidence.predicted, photos.stored
    if backbone == "EfficientNet-Lite0":
        return (stored["vectors"].float() @ target.head.weight[classes][..., None])[..., 0]
    method = posthoc.build("GAE", target, target.grid)
    with torch.autocast("cpu", torch.bfloat16):
        parts = [method(*batch) for batch in zip(stored["images"].split(20), classes.split(20), strict=True)]
    return torch.cat(parts).flatten(1).float()


def count_alarms(target: TargetModel, clean: dict[str, Tensor], seed: int) -> dict[str, Any]:
    """Audit photos in which nothing is planted."""
    drawn = draw_photos(1.0, seed)
    target.head = fit_head(clean["embeddings"][0, drawn.fit], drawn.fit % target.num_classes)
    groups, _ = Audited(target, clean, drawn.audit, torch.zeros(AUDIT, dtype=torch.long)).audit()
    alarms = [summarise(group) for group in groups if group.suspicion >= SUSPICIOUS]
    return {"found": len(groups), "alarms": len(alarms), "suspicion": alarms}


def load_pair(data: Path, store: Path, backbone: str, variants: Sequence[str]) -> dict[str, Tensor]:
    """Load variants of all photos and what a backbone makes of them, one upon the other: (2, M, ...)."""
    loaded = [load_variant(data, store, variant, backbone) for variant in variants]
    return {name: torch.stack([each[name] for each in loaded]) for name in loaded[0]}


def mean_error(values: Sequence[float | None]) -> str:
    """Write a mean over draws with its standard error; how many draws have none."""
    known = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    if not len(known):
        return "none"
    missing = f" ({len(known)} of {len(values)})" * (len(known) < len(values))
    return f"{known.mean():.3g} ± {known.std() / len(known) ** 0.5:.2g}{missing}"


def tabulate(records: Sequence[dict[str, Any]]) -> str:
    """Write three tables of the means over draws: groups, accuracies of heads, and accuracies of strengths."""
    cases = defaultdict(list)
    for record in records:
        cases[f"{record['backbone']} | {record['fault']} | {record['correlation']}"].append(record)
    lines = [f"| Backbone | Fault | % | Method | {' | '.join(JUDGED)} |", "| --- " * 9 + "|"]
    for title, found in cases.items():
        for method in found[0]["groups"]:
            cells = [mean_error([record["groups"][method][name] for record in found]) for name in JUDGED]
            lines.append(f"| {title} | {method} | {' | '.join(cells)} |")
    for strengths in (False, True):
        heads = {name for record in records for name in record["accuracy"] if name.startswith("strength") == strengths}
        names = sorted(heads, key=lambda name: [*records[0]["accuracy"]].index(name))
        lines += ["", f"| Backbone | Fault | % | {' | '.join(names)} |", "| --- " * (3 + len(names)) + "|"]
        for title, found in cases.items():
            cells = []
            for name in names:
                known = [each["accuracy"][name] for each in found if name in each["accuracy"]]
                cells.append(" / ".join(mean_error([each[of] for each in known]) for of in ("same", "swapped")))
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Does an audit find planted faults?")
    parser.add_argument("--data", type=Path, required=True, help="folder of cats_vs_dogs, imagenette and weights")
    parser.add_argument("--store", type=Path, required=True, help="folder for what is computed once, 10 GB")
    parser.add_argument("--output", type=Path, required=True, help="folder of results, which are not repeated")
    parser.add_argument("--backbones", nargs="+", default=list(BACKBONES), choices=BACKBONES)
    parser.add_argument("--faults", nargs="+", default=[*VARIANTS, *NULL], choices=[*VARIANTS, *NULL])
    parser.add_argument("--correlations", nargs="+", type=int, default=[95], help="per cent (95)")
    parser.add_argument("--draws", type=int, default=3, help="number of draws (3)")
    options = parser.parse_args(arguments)
    for backbone in options.backbones:
        file = options.output / f"{BACKBONES[backbone][0]}.json"
        records = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
        plain, _ = build(options.data, backbone)
        for fault in options.faults:
            both = load_pair(options.data, options.store, backbone, VARIANTS.get(fault, (fault,)))
            target = InBFloat16(plain, head=nn.Linear(plain.embed_dim, NULL.get(fault, 2))).eval()
            for correlation in options.correlations if fault in VARIANTS else [0]:
                for seed in range(options.draws):
                    case = {"backbone": backbone, "fault": fault, "correlation": correlation, "seed": seed}
                    if any(case.items() <= record.items() for record in records):
                        continue
                    if fault in NULL:
                        found = count_alarms(target, both, seed)
                    else:
                        found = measure(backbone, target, both, correlation / 100, seed, correlation == 95)
                    records.append(case | found)
                    with atomic(file) as path:
                        path.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n", encoding="utf-8")
        print(tabulate([record for record in records if "accuracy" in record]), flush=True)


if __name__ == "__main__":
    main()
