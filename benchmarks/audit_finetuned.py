"""Do fully fine-tuned models rely on planted faults more than heads on a frozen backbone, and does an audit find them?

    python benchmarks/audit_finetuned.py --data ../data --store /tmp/audits --output docs/results/audits/finetuned.json

The photos, faults, draws and judgements are those of `audits.py`: cats and dogs, of which the fault agrees with the
class in 95 %. A head is fitted to the frozen ViT-Tiny, or all of its weights are trained. Vectors are those of PathFlow
and DirectPaths, which need no training, and of the shipped AnyHead, which was trained for the frozen weights. The
repair takes out the groups that are planted, as a person would mark them. Standard errors are over draws.
"""

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

import explainers
from benchmarks.any_model import load_model
from benchmarks.audit_faults import add_watermark
from benchmarks.audit_images import BACKBONES, PATCH, POOL, TEST, VARIANTS
from benchmarks.audits import (
    Audited,
    Draw,
    Found,
    InBFloat16,
    accuracies,
    draw_photos,
    fit_head,
    judge,
    load_pair,
    mean_error,
    summarise,
)
from explainers import posthoc
from explainers.anyhead import AnyHead
from explainers.auditing.groups import assign
from explainers.models import TargetModel, as_target
from explainers.saved.files import atomic

SHIPPED = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
EPOCHS, BATCH, RATE = 3, 16, 1e-4
CORRELATION, AUDITED = 0.95, 160
"""Share of the photos in which the fault agrees, and photos to audit."""
FAULTS = "background", "watermark"
MODELS = "frozen", "fine-tuned"
METHODS = "PathFlow", "DirectPaths", "AnyHead"


def finetune(target: TargetModel, images: Tensor, labels: Tensor, seed: int) -> TargetModel:
    """Train all weights of a copy on uint8 images (B, 3, H, W)."""
    torch.manual_seed(seed)
    target = target.copied().requires_grad_(True).train()
    steps = EPOCHS * (len(images) // BATCH)
    optimiser = torch.optim.AdamW(target.parameters(), RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, steps, pct_start=0.2)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(images)).split(BATCH)[: len(images) // BATCH]:
            embeddings = target.embed(target.normalise(images[chosen]))
            loss = F.cross_entropy(target.classify(embeddings), labels[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return target.eval().requires_grad_(False)


def load_target(data: Path) -> TargetModel:
    """ViT-Tiny with a new head of two classes."""
    return InBFloat16(as_target(load_model(data, BACKBONES["ViT-Tiny"][0], head=False)), head=nn.Linear(192, 2)).eval()


@torch.no_grad()
def embed(target: TargetModel, images: Tensor) -> Tensor:
    """Embed uint8 images (B, 3, H, W): (B, D)."""
    return torch.cat([target.embed(target.normalise(batch)) for batch in images.split(32)])


def load_photos(data: Path, store: Path, fault: str) -> dict[str, Tensor]:
    """All photos in both variants: images (2, M, 3, H, W), shares of patches that are the fault (2, M, N), and more.

    The watermark is on whole photos. Embeddings (2, M, D) are those of the frozen backbone.
    """
    if fault == "background":
        return load_pair(data, store, "ViT-Tiny", VARIANTS[fault])
    clean = load_pair(data, store, "ViT-Tiny", ("clean", "clean"))
    for number, image in enumerate(clean["images"][1]):
        marked, mask = add_watermark(Image.fromarray(image.movedim(0, -1).numpy()), random.Random(number))
        clean["images"][0, number] = torch.from_numpy(np.array(marked)).movedim(-1, 0)
        clean["shares"][0, number] = F.avg_pool2d(torch.from_numpy(mask)[None].float(), PATCH).flatten()
    clean["embeddings"][0] = embed(load_target(data), clean["images"][0]).half()
    return clean


def prepare(
    data: Path, store: Path, fault: str, seed: int, model: str, both: dict[str, Tensor]
) -> tuple[TargetModel, Tensor]:
    """The model of one draw, and the embeddings (2, M, D) of all photos, of which a fine-tuned one has those to test.

    A fine-tuned model is stored.
    """
    drawn, target = draw_photos(CORRELATION, seed), load_target(data)
    rows, images, frozen = (drawn.variants[drawn.fit], drawn.fit), both["images"], both["embeddings"]
    if model == "frozen":
        target.head = fit_head(frozen[rows], drawn.fit % 2)
        return target, frozen
    file = store / f"finetuned {fault} {seed}.safetensors"
    if not file.exists():
        target.head.load_state_dict({name: 0 * weight for name, weight in target.head.state_dict().items()})
        target = finetune(target, images[rows], drawn.fit % 2, seed)
        found = torch.zeros(2, POOL + TEST, target.embed_dim)
        for variant in (0, 1):
            found[variant, POOL:] = embed(target, images[variant, POOL:])
        save_file(target.state_dict() | {"embeddings": found}, file)
    weights = load_file(file)
    embeddings = weights.pop("embeddings")
    target.load_state_dict(weights)
    return target.requires_grad_(False), embeddings


def build(method: str, target: TargetModel, data: Path) -> Any:
    """An explainer with vectors; AnyHead ignores that it was trained for other weights, `allow_finetuned_backbone`."""
    if method != "AnyHead":
        return posthoc.build(method, target, target.grid)
    shipped = explainers.load(SHIPPED, target=as_target(load_model(data, BACKBONES["ViT-Tiny"][0])))
    return AnyHead(target, target.grid, lambda *_: shipped.network, blend=shipped.blend).eval()


def count_dimensions(embeddings: Tensor) -> float:
    """The participation ratio (Σ λ)² / Σ λ² of embeddings (B, D), for the eigenvalues λ of their covariance."""
    values = torch.linalg.eigvalsh(embeddings.double().mT.cov())
    return (values.sum() ** 2 / values.square().sum()).item()


def measure(explainer: Any, both: dict[str, Tensor], drawn: Draw, seed: int) -> dict[str, Any]:
    """Audit and repair a model; images (2, M, 3, H, W), shares (2, M, N) and embeddings (2, M, D) are of all photos."""
    target: TargetModel = explainer.target
    rows = drawn.audit[torch.randperm(len(drawn.audit), generator=torch.Generator().manual_seed(seed))[:AUDITED]]
    variants = drawn.variants[rows]
    vectors = torch.zeros(2, POOL, target.grid.num_patches, target.embed_dim, dtype=torch.float16)
    embeddings = both["embeddings"].clone()
    for some, of in zip(rows.split(20), variants.split(20), strict=True):
        computed, embedded = explainer.decompose(both["images"][of, some])
        vectors[of, some], embeddings[of, some] = computed.half(), embedded.to(embeddings.dtype)
    photos = Audited(target, both | {"vectors": vectors, "embeddings": embeddings}, rows, variants)
    groups, centres = photos.audit()
    scores = torch.tensor([group.suspicion for group in groups])
    found = judge(
        Found(photos.evidence.patches.long(), assign(photos.evidence, centres), scores), photos.stored["shares"]
    )
    planted = [groups[index] for index in found["planted"]]
    costs = {of: [getattr(group, of).mean for group in planted if getattr(group, of)] for of in ("hidden", "random")}
    head, strength = photos.repair(centres, found["planted"]) if planted else (target.head, 0.0)
    return found | {
        **{of: sum(values) / len(values) if values else None for of, values in costs.items()},
        "share": sum(group.share for group in planted),
        "strength": strength,
        "dimensions": count_dimensions(both["embeddings"][:, POOL:].flatten(0, 1)),
        "accuracy": {"before": accuracies(target.head, embeddings), "after": accuracies(head, embeddings)},
        "suspicion": [summarise(group) for group in groups],
    }


def tabulate(records: Sequence[dict[str, Any]]) -> str:
    """Write a row for each fault, model and method."""
    cases = defaultdict(list)
    for record in records:
        cases[record["fault"], record["model"], record["method"]].append(record)
    columns = "groups", "rank", "purity", "recall", "area", "share", "hidden", "random", "dimensions"
    lines = [f"| Fault | Model | Vectors | {' | '.join(columns)} | before | after |", "| --- " * 14 + "|"]
    for key, found in cases.items():
        cells = [mean_error([record[name] for record in found]) for name in columns]
        for when in ("before", "after"):
            known = [record["accuracy"][when] for record in found]
            cells.append(" / ".join(mean_error([each[of] for each in known]) for of in ("same", "swapped")))
        lines.append(f"| {' | '.join([*key, *cells])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Do fine-tuned models rely on planted faults?")
    parser.add_argument("--data", type=Path, required=True, help="folder of cats_vs_dogs, imagenette and weights")
    parser.add_argument("--store", type=Path, required=True, help="folder for photos and weights, computed once")
    parser.add_argument("--output", type=Path, required=True, help="file of results, which are not repeated")
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--draws", type=int, default=3, help="number of draws (3)")
    options = parser.parse_args(arguments)
    for fault in options.faults:
        both = load_photos(options.data, options.store, fault)
        for seed in range(options.draws):
            for model in options.models:
                target, embeddings = prepare(options.data, options.store, fault, seed, model, both)
                for method in options.methods:
                    case = {"fault": fault, "model": model, "method": method, "seed": seed}
                    records = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else []
                    if any(case.items() <= record.items() for record in records):
                        continue
                    drawn, explainer = draw_photos(CORRELATION, seed), build(method, target, options.data)
                    found = measure(explainer, both | {"embeddings": embeddings}, drawn, seed)
                    with atomic(options.output) as path:
                        path.write_text(json.dumps([*records, case | found], indent=1), encoding="utf-8")
    print(tabulate(json.loads(options.output.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
