"""Fidelity against the number of masked passes: refined explainers beside KernelSHAP, LIME and RISE.

    python benchmarks/curve.py --data data/imagenet_val --weights vit_tiny.safetensors --images 50 --bf16 \
        --removals zero drop --passes 16 64 256 1024 --output curve.json --figure curve.png
    python benchmarks/curve.py ... --explainers AnyHead --methods GAE --output others.json
    python benchmarks/curve.py --read curve.json others.json --figure curve.png      # joins the files of two commands

Every batch of images is written to the output when it is finished; the same command continues. `AnyHead`,
`DecompX-PLUS` (any method of `explainers.posthoc`) and `none` are priors of `explainers.refine`. Other explainers make
as many passes as `--passes` says; those of `--methods` are counted. Files of other `--removals` or `--passes` can be
joined. The yardstick is Spearman's correlation over patches with the heatmaps of the most passes, for explainers of one
pass; `halves` is that of two fits to half of the pairs each.
`--explainers cost` measures the time of `refine` relative to its masked passes alone.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

import explainers
from benchmarks.curve_heatmaps import BASELINES, Batch, explain_once, halves, refine_heatmaps, seconds
from benchmarks.curve_tables import draw_figure, join_files, tables
from benchmarks.explain import device_name
from datamodules.ilsvrc import imagenet_boxes
from explainers.errors import InputError
from explainers.evaluation.sweep import Sweep
from explainers.metrics.agreement import spearman
from explainers.metrics.curves import Curve
from explainers.metrics.perturbation import PerturbationCurves
from explainers.models import TargetModel
from explainers.models.fetching import timm_model
from explainers.posthoc import build
from explainers.runtime.progress import progress
from explainers.saved.files import write_atomically
from explainers.saved.records import versions

MODEL = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
YARDSTICK = ("AnyHead", "AttnLRP-PLUS", "DecompX-PLUS", "GAE", "DirectPaths", "Chance")
"""Explainers of one pass that are compared with the heatmaps of the most passes."""
SIDES: tuple[Curve, ...] = ("fidelity_plus", "fidelity_minus")
SHARED = ("model", "weights", "anyhead", "images", "batch_size", "removals", "passes", "levels", "fit", "seed", "bf16")
"""Options on which the numbers depend: files with others are neither continued nor joined."""


def build_explainer(name: str, target: TargetModel, folder: str | None) -> Any:
    """Build an explainer by its name: AnyHead from a folder or the shipped one, or a method without training."""
    if name == "AnyHead":
        return explainers.load(folder or MODEL, target=target).eval()
    return None if name == "none" else build(name, target, target.grid)


def fidelity(batch: Batch, heatmaps: Tensor, index: Tensor, levels: int) -> dict[str, list[float]]:
    """Fidelity⁺ and Fidelity⁻ of every image."""
    sweep = Sweep(batch.target, batch.grid, batch.removal, levels, chunk_size=batch.chunk_size)
    with torch.no_grad():
        normalised = batch.target.normalise(batch.images)
        logits = batch.target(batch.images)
        whole = torch.stack([logits, sweep.empty(normalised).expand_as(logits)], 1)
        unknown = torch.full_like(batch.classes, -1)
        outputs = sweep(normalised, heatmaps, index, batch.classes, unknown, whole)
    curves = PerturbationCurves(batch.grid.num_patches, SIDES, levels)
    curves.update(outputs)
    return {side: values.tolist() for side, values in curves.name_numbers("", curves.rows()).items()}


def measure_explainer(
    name: str, batch: Batch, index: Tensor, options: argparse.Namespace, first: bool
) -> dict[str, Any]:
    """The numbers of every image of a batch for one explainer and removal; the time of the `first` batch alone."""
    if name == "cost":
        return {"cost": seconds(build_explainer("AnyHead", batch.target, options.anyhead), batch) if first else {}}
    numbers: dict[str, Any] = {}
    if name in options.methods:
        heatmaps, spent = explain_once(build_explainer(name, batch.target, options.anyhead), batch)
        numbers["spent"] = {str(passes): counts for passes, counts in spent.items()}
    elif name in BASELINES:
        heatmaps = BASELINES[name](batch)
    else:
        prior = build_explainer(name, batch.target, options.anyhead)
        heatmaps, refinement = refine_heatmaps(prior, batch, options.fit, options.seed)
        best = heatmaps[max(heatmaps)].flatten(1)
        numbers["yardstick"] = {"halves": halves(refinement).tolist()}
        for other in YARDSTICK if name in ("AnyHead", "none") else ():
            quick = build_explainer(other, batch.target, options.anyhead)(batch.images, batch.classes)
            numbers["yardstick"][other] = spearman(quick.detach().flatten(1), best).tolist()
    numbers["fidelity"] = {
        str(passes): fidelity(batch, each, index, options.levels) for passes, each in heatmaps.items()
    }
    return numbers


def batches(options: argparse.Namespace) -> Iterator[tuple[str, Batch, Tensor]]:
    """Key, images and indices of every batch, for every removal."""
    target = TargetModel(timm_model(options.model, options.weights)).eval()
    samples = imagenet_boxes(options.data, target.transform, crop_fraction=0.875, limit=options.images)
    for start in range(0, len(samples), options.batch_size):
        chosen: list[Any] = [samples[i] for i in range(start, min(start + options.batch_size, len(samples)))]
        images = torch.stack([sample["image"] for sample in chosen])
        index = torch.tensor([int(sample["index"]) for sample in chosen])
        with torch.no_grad():
            classes = target(images).argmax(-1)
        batch = Batch(target, target.grid, images, classes, sorted(options.passes), chunk_size=options.chunk_size)
        for removal in options.removals:
            yield f"{removal}/{start}", replace(batch, removal=removal), index


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what the output does not have yet; the output is written after every explainer of every batch."""
    torch.set_num_threads(options.threads)
    settings = {name: value for name, value in vars(options).items() if name in SHARED}
    machine = versions() | {"device": device_name(torch.device("cpu"))}
    results: dict[str, Any] = {"settings": settings, "machine": machine, "numbers": {}}
    if options.output.exists():
        results = json.loads(options.output.read_text(encoding="utf-8"))
        if results["settings"] != json.loads(json.dumps(settings)):
            raise InputError(f"expected the settings of {options.output}, got others: give another output")
    names = [*options.explainers, *options.methods]
    total = len(names) * len(options.removals) * -(-options.images // options.batch_size)
    with progress("curve", total, "batch") as bar:
        for key, batch, index in batches(options):
            for name in names:
                kept = results["numbers"].setdefault(name, {})
                if key not in kept:
                    with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
                        kept[key] = measure_explainer(name, batch, index, options, key.endswith("/0"))
                    write_atomically(options.output, json.dumps(results))
                bar.update()
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fidelity against the number of masked passes.")
    parser.add_argument("--data", type=Path, help="folder of ImageNet validation images, as data=imagenet_val")
    parser.add_argument("--model", default=MODEL, help=f"name in timm ({MODEL})")
    parser.add_argument("--weights", help="file of the model's weights (those that timm downloads)")
    parser.add_argument("--anyhead", help="folder of a trained AnyHead (the shipped one)")
    parser.add_argument("--images", type=int, default=50, help="number of images, evenly spaced (50)")
    parser.add_argument("--batch-size", type=int, default=10, help="images per batch (10)")
    parser.add_argument("--removals", nargs="+", choices=["zero", "black", "drop"], default=["zero", "drop"])
    parser.add_argument("--passes", nargs="+", type=int, default=[16, 64, 256, 1024])
    parser.add_argument("--levels", type=int, default=11, help="sparsities of the fidelity (11)")
    parser.add_argument(
        "--explainers", nargs="+", default=["AnyHead", "DecompX-PLUS", "none", *BASELINES, "cost"], help="(all)"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=[],
        help="methods without masked passes, as they are: AnyHead or explainers.posthoc",
    )
    parser.add_argument("--fit", default="ranking", choices=["ranking", "regions", "shapley"], help="see refine")
    parser.add_argument("--seed", type=int, default=0, help="seed of the coalitions of refine (0)")
    parser.add_argument("--chunk-size", type=int, default=64, help="maximum masked images in memory (64)")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    parser.add_argument("--output", type=Path, default=Path("curve.json"), help="JSON file of all numbers (curve.json)")
    parser.add_argument("--read", type=Path, nargs="+", help="measure nothing; join these files")
    parser.add_argument("--figure", type=Path, help="PNG file")
    options = parser.parse_args(arguments)
    if not options.read and options.data is None:
        parser.error("--data or --read is needed")
    found = [json.loads(path.read_bytes()) for path in options.read] if options.read else [measure(options)]
    results = join_files(found)
    print(tables(results))
    if options.figure:
        draw_figure(results).savefig(options.figure, dpi=120)


if __name__ == "__main__":
    main()
