"""Cost of explaining 1 to 1000 prompts of an image, beside methods that need a backward pass for each prompt.

    python benchmarks/prompts.py                                      # CLIP ViT-B/32
    python benchmarks/prompts.py --target clip_vit_b16 --target vit_tiny --output prompts.json

Every prompt is a functional of the embedding; models and explainers have random weights, which do not change the speed.
`plain` is the embedding alone. In every round each method runs once with each number of prompts, so that other work on
the machine slows all alike; the first round is not counted. Compare numbers of the same run only.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.explain import CONFIGS, Call, choose_device, device_name, finish, parser_of, seconds
from explainers import posthoc
from explainers.saved.records import versions

ANYHEAD = {"AnyHead": "flow", "AnyHead, direct paths": "direct"}
"""Label → the paths that AnyHead reads."""

METHODS = ("DirectPaths", "MaskCLIP", "GradECLIP", "LeGrad", "DecompX-PLUS")
GRADIENTS = posthoc.GradECLIP, posthoc.LeGrad, posthoc.PLUS
CHUNK, MOST = 50, 100
"""Largest numbers of prompts of which methods take gradients at once, and at all: 1000 would take minutes."""


def build(target: str, device: torch.device) -> dict[str, Any]:
    """Label → explainer of one model; `plain` is the model."""
    settings = [f"target={target}", "target.model.pretrained=false", "explainers@explainer=anyhead"]
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        configs = {
            label: compose("train", [*settings, f"explainer.network.paths={ANYHEAD[label]}"]) for label in ANYHEAD
        }
    model = instantiate(next(iter(configs.values())).target)
    found = {"plain": model}
    found |= {label: instantiate(config.explainer, target=model) for label, config in configs.items()}
    found |= {name: posthoc.build(name, model, model.grid) for name in METHODS}
    return {label: module.to(device).eval() for label, module in found.items()}


def explain(explainer: Any, functionals: Tensor, images: Tensor) -> None:
    """Explain functionals (V, D) of every image; gradients of at most `CHUNK` of them at once."""
    for some in functionals.split(CHUNK) if isinstance(explainer, GRADIENTS) else [functionals]:
        explainer.explain(images, some.expand(len(images), -1, -1))


def measure_target(target: str, options: argparse.Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    """Method → number of prompts → milliseconds per image; `plain` has one number, for 0 prompts."""
    modules = build(target, device)
    model = modules.pop("plain")
    size = model.grid.image_size
    images = torch.randint(0, 256, (options.batch_size, 3, size, size), dtype=torch.uint8, device=device)
    generator = torch.Generator().manual_seed(0)
    functionals = torch.randn(max(options.prompts), model.embed_dim, generator=generator).to(device)
    calls: dict[tuple[str, int], Call] = {("plain", 0): lambda images: model.embed(model.normalise(images))}
    for label, explainer in modules.items():
        for count in options.prompts:
            if count <= MOST or not isinstance(explainer, GRADIENTS):
                calls[label, count] = partial(explain, explainer, functionals[:count])
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16"):
        taken = seconds(calls, images, options.rounds)
    costs: dict[str, dict[str, float]] = {}
    for (label, count), durations in taken.items():
        costs.setdefault(label, {})[str(count)] = 1e3 * median(durations) / len(images)
        if count:
            ratios = [own / one for own, one in zip(durations, taken[label, options.prompts[0]], strict=True)]
            costs[label][f"ratio_{count}"] = median(ratios)
    return costs


def table(targets: dict[str, dict[str, dict[str, float]]], prompts: Sequence[int]) -> str:
    """A row for each target and method: milliseconds per image, and the ratio of its most prompts to one."""
    head = " | ".join(f"{count} prompt{'s' * (count > 1)}" for count in prompts)
    lines = [f"| Target | Method | {head} | most / {prompts[0]} |", "| --- " * (len(prompts) + 3) + "|"]
    for target, methods in targets.items():
        for label, costs in methods.items():
            if label == "plain":
                lines.append(f"| {target} | plain, {costs['0']:.1f} ms |{' |' * (len(prompts) + 1)}")
                continue
            numbers = " | ".join(f"{costs[str(count)]:.1f}" if str(count) in costs else "–" for count in prompts)
            most = max(count for count in prompts if str(count) in costs)
            lines.append(f"| {target} | {label} | {numbers} | {costs[f'ratio_{most}']:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("Cost of explaining 1 to 1000 prompts.")
    parser.add_argument("--target", action="append", help="a config of configs/target, repeatable (clip_vit_b32)")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[1, 10, 100, 1000], help="numbers of prompts (1 10 100 1000)"
    )
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--batch-size", type=int, default=8, help="images per batch (8)")
    parser.add_argument("--rounds", type=int, default=3, help="number of counted rounds (3)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    targets = {name: measure_target(name, options, device) for name in options.target or ["clip_vit_b32"]}
    machine = {key: vars(options)[key] for key in ("threads", "precision", "batch_size", "rounds", "prompts")}
    results = {"machine": versions() | {"device": device_name(device)} | machine, "milliseconds": targets}
    settings = f"{options.threads} threads, {options.precision}; milliseconds per image"
    finish(results, settings, table(targets, options.prompts), options.output)


if __name__ == "__main__":
    main()
