"""How often do the intervals of `explainers.refine`, ± 1.96 standard errors, contain what endless passes would give?

    python benchmarks/error_coverage.py --output coverage.json                  # a small ViT with random weights
    python benchmarks/error_coverage.py --data data/imagenet_val --weights FILE --bf16 --output coverage.json
    python benchmarks/error_coverage.py --read coverage.json

Coalitions of `regions` and `shapley` are independent, so a repetition draws its pairs from `--pool` pairs of the image,
and the truth is the least-squares fit to all of them. With `ranking`, each repetition is a run with another seed, and
the truth is the mean heatmap of `--limits` runs of twice `--pool` passes. Heatmaps are compared relative to their mean.
Errors and standard errors are relative to the standard deviation of the true heatmap. The last table is of the runs of
`ranking`, each stopped by a tolerance; a claimed error is what `Refinement.precision` says.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

import explainers
from benchmarks.explain import device_name
from datamodules.ilsvrc import imagenet_boxes
from explainers.models import TargetModel
from explainers.models.fetching import timm_model
from explainers.posthoc import build
from explainers.refinement import Refinement, refine
from explainers.refinement.coalitions import EARLIEST, weigh_pairs
from explainers.refinement.fit import fit_pairs
from explainers.report.tables import markdown
from explainers.runtime.progress import progress
from explainers.saved.files import write_atomically
from explainers.saved.records import versions

MODEL = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
TOLERANCES = 0.3, 0.5, 0.7, 0.9
FIRST_SEED = 100  # of the runs that give the truth

Runs = tuple[Tensor, Tensor, Tensor]
"""Heatmaps and standard errors of each repetition, number of passes and image, (R, T, B, N); true heatmaps (B, N)."""


def small_vit() -> tuple[TargetModel, Tensor, Any]:
    """A ViT of 8 × 8 patches with random weights of the size that training gives, three images, and a prior."""
    random = torch.Generator().manual_seed(0)
    size: dict[str, Any] = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **size)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=random)
            weight.copy_(1.5 * noise / weight[0].numel() ** 0.5 if weight.dim() > 1 else weight + 0.3 * noise)
    colours = torch.rand(3, 3, 4, 4, generator=random)
    images = (255 * F.interpolate(colours, 32, mode="bicubic").clamp(0, 1)).to(torch.uint8)
    target = TargetModel(model).eval()
    return target, images, build("DecompX-PLUS", target, target.grid)


def vit_tiny(options: argparse.Namespace) -> tuple[TargetModel, Tensor, Any]:
    """ViT-Tiny, images of ImageNet, and the shipped AnyHead as prior."""
    target = TargetModel(timm_model(MODEL, options.weights)).eval()
    samples = imagenet_boxes(options.data, target.transform, crop_fraction=0.875, limit=options.images)
    read: list[Any] = [samples[i] for i in range(len(samples))]
    return target, torch.stack([sample["image"] for sample in read]), explainers.load(MODEL, target=target).eval()


def centre(heatmaps: Tensor) -> Tensor:
    """Heatmaps (B, P, P) minus their means, float64 (B, N)."""
    flat = heatmaps.flatten(1).double()
    return flat - flat.mean(1, keepdim=True)


def independent(pool: Refinement, prior: Any, options: argparse.Namespace) -> Runs:
    """Repetitions whose pairs are drawn from a pool."""
    v = pool.functionals.double()
    keep = pool.pairs.keep
    observed = pool.pairs.differences.double() @ v.mT  # (B, M, 1)
    weights = weigh_pairs(pool.fit, keep)
    total = None if pool.total is None else (pool.total.double()[:, None] @ v.mT)[:, 0]
    like = pool.prior.of_functionals(v.float()).mT * (prior is not None)  # (B, N, 1)
    random = torch.Generator().manual_seed(options.seed)
    found: list[list[tuple[Tensor, Tensor]]] = []
    for _ in range(options.repetitions):
        drawn = torch.randperm(keep.shape[1], generator=random)
        found.append([])
        for passes in options.passes:
            chosen = drawn[: passes // 2]
            some = None if weights is None else weights[:, chosen]
            one = torch.ones(len(keep), 1)
            fit = fit_pairs(keep[:, chosen], observed[:, chosen], like, one, total, some)
            values, errors = fit.heatmaps(one[:, None])
            found[-1].append((centre(values[:, 0]), errors[:, 0]))
    heatmaps, errors = (torch.stack([torch.stack([row[i] for row in rows]) for rows in found]) for i in (0, 1))
    return heatmaps, errors, least_squares(keep, observed, total, weights)


def least_squares(keep: Tensor, observed: Tensor, total: Tensor | None, weights: Tensor | None) -> Tensor:
    """The attributions of many pairs without prior or penalty, minus their mean: (B, N)."""
    signs = 2 * keep.double() - 1
    if total is not None:  # then their mean is known
        observed = observed - signs.mean(-1, keepdim=True) * total[:, None]
        signs = signs - signs.mean(-1, keepdim=True)
    root = torch.ones_like(observed) if weights is None else weights.double().sqrt()[..., None]
    values = torch.linalg.pinv(root * signs) @ (root * observed)
    return centre(values)


def adaptive(target: TargetModel, images: Tensor, prior: Any, options: argparse.Namespace) -> Runs:
    """Repetitions of `ranking`, whose coalitions depend on those before."""

    def start(seed: int) -> Refinement:
        settings = {"target": target, "removal": options.removal, "chunk_size": options.chunk_size}
        return refine(prior, images, None, options.passes[0], fit="ranking", seed=seed, **settings)

    limits = [start(FIRST_SEED + i).more(2 * options.pool - options.passes[0]) for i in range(options.limits)]
    truth = torch.stack([centre(limit.heatmaps) for limit in limits]).mean(0)
    heatmaps, errors = [], []
    with progress("coverage of ranking", options.repetitions, "run") as bar:
        for seed in range(FIRST_SEED + options.limits, FIRST_SEED + options.limits + options.repetitions):
            run = start(seed)
            estimates = []
            for passes in options.passes:
                run = run.more(passes - run.passes) if passes > run.passes else run
                estimates.append((centre(run.heatmaps), run.errors.flatten(1).double()))
            heatmaps.append(torch.stack([values for values, _ in estimates]))
            errors.append(torch.stack([error for _, error in estimates]))
            bar.update(1)
    return torch.stack(heatmaps), torch.stack(errors), truth


def summary(runs: Runs, passes: Sequence[int]) -> dict[str, Any]:
    """Coverage, error and standard error for each number of passes, and what tolerances save."""
    heatmaps, errors, truth = runs
    wrong = heatmaps - truth
    spread = truth.std(-1)
    covered = (wrong.abs() <= 1.96 * errors).double().mean((0, 2, 3))
    root = [(each.square().mean((0, 3)).sqrt() / spread).mean(-1) for each in (wrong, errors)]
    rows = {
        str(count): {"coverage": covered[i].item(), "error": root[0][i].item(), "claimed": root[1][i].item()}
        for i, count in enumerate(passes)
    }
    precision = errors.median(-1).values / heatmaps.std(-1)  # (R, T, B)
    true = wrong.square().mean(-1).sqrt() / spread
    return {"passes": rows, "tolerances": stop_images(precision, true, passes)}


def stop_images(precision: Tensor, true: Tensor, passes: Sequence[int]) -> dict[str, Any]:
    """Tolerance → means of passes, claimed and true error where single images stop, (R, T, B) each."""
    rounds = torch.tensor(passes)
    found = {}
    for tolerance in TOLERANCES:
        may = (precision < tolerance) & (rounds >= EARLIEST)[:, None]
        may[:, -1] = True
        at = may.double().argmax(1, keepdim=True)  # the first
        parts = {"passes": rounds[at].double(), "claimed": precision.gather(1, at), "error": true.gather(1, at)}
        found[str(tolerance)] = {name: values.mean().item() for name, values in parts.items()}
    return found


def measure(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """`<draw> <prior>` → `summary`."""
    target, images, prior = vit_tiny(options) if options.data else small_vit()
    priors = {"AnyHead" if options.data else "DecompX-PLUS": prior, "none": None}
    for fit in options.fits:
        if fit == "ranking":
            for name, explainer in priors.items():
                yield f"{fit} {name}", summary(adaptive(target, images, explainer, options), options.passes)
            continue
        settings = {"target": target, "removal": options.removal, "chunk_size": options.chunk_size}
        pool = refine(prior, images, None, 8, fit=fit, seed=options.seed, **settings)
        with progress(f"pairs of {fit}", options.pool, "pair") as bar:
            while len(pool.pairs) < options.pool:
                before = len(pool.pairs)
                pool.more(2 * min(256, options.pool - before))
                bar.update(len(pool.pairs) - before)
        for name, explainer in priors.items():
            yield f"{fit} {name}", summary(independent(pool, explainer, options), options.passes)


def tables(results: dict[str, Any]) -> str:
    """Coverage, with the error and the standard error; and passes, claimed and true error for each tolerance."""
    rows, saved = [], []
    for name, numbers in results["numbers"].items():
        cells = {
            count: f"{one['coverage']:.3f} ({one['error']:.2f}, {one['claimed']:.2f})"
            for count, one in numbers["passes"].items()
        }
        rows.append({"Coalitions and prior": name} | cells)
        if name.startswith("ranking"):
            saved += [
                {"Prior": name.split()[1], "Tolerance": tolerance}
                | {"Passes": f"{one['passes']:.0f}", "Claimed": f"{one['claimed']:.2f}", "True": f"{one['error']:.2f}"}
                for tolerance, one in numbers["tolerances"].items()
            ]
    return f"Coverage (error, standard error):\n\n{markdown(rows)}\n\n{markdown(saved) if saved else ''}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Coverage of the intervals of refined heatmaps.")
    parser.add_argument("--data", type=Path, help="folder of ImageNet validation images, for ViT-Tiny")
    parser.add_argument("--weights", help="file of ViT-Tiny's weights (those that timm downloads)")
    parser.add_argument("--images", type=int, default=2, help="images of ImageNet (2)")
    parser.add_argument("--removal", default="zero", choices=["zero", "black", "drop"], help="see refine (zero)")
    parser.add_argument("--fits", nargs="+", default=["ranking", "regions", "shapley"], help="see refine (all)")
    parser.add_argument("--passes", nargs="+", type=int, default=[16, 32, 64, 128, 256], help="in ascending order")
    parser.add_argument("--repetitions", type=int, default=200, help="of each number of passes (200)")
    parser.add_argument("--pool", type=int, default=4096, help="pairs of each image that give the truth (4096)")
    parser.add_argument("--limits", type=int, default=4, help="runs that give the truth for ranking (4)")
    parser.add_argument("--chunk-size", type=int, default=32, help="maximum masked images in memory (32)")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the pools (0)")
    parser.add_argument("--output", type=Path, default=Path("coverage.json"), help="JSON file (coverage.json)")
    parser.add_argument("--read", type=Path, help="measure nothing; print the tables of this file")
    options = parser.parse_args(arguments)
    if options.read:
        print(tables(json.loads(options.read.read_text(encoding="utf-8"))))
        return
    torch.set_num_threads(options.threads)
    settings = {name: str(value) for name, value in vars(options).items()}
    machine = versions() | {"device": device_name(torch.device("cpu"))}
    results: dict[str, Any] = {"settings": settings, "machine": machine, "numbers": {}}
    with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
        for name, numbers in measure(options):
            results["numbers"][name] = numbers
            write_atomically(options.output, json.dumps(results))
    print(tables(results))


if __name__ == "__main__":
    main()
