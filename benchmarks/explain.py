"""What an explanation costs, in one run: beside the target's own inference, and for ever more tasks.

    python benchmarks/explain.py                                               # ViT-Ti/16
    python benchmarks/explain.py --target vit_base --target swin_base --precision bf16 --output explain.json

`plain` is a prediction without an explanation; every other method explains the predicted class of each image. They are
built from `configs/`, with random weights, which take the same time. Methods take turns, round by round, so that other
work on the machine disturbs all alike; a first round is not counted. Compare the numbers of one run only.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # the configurations may name what is not installed

from explainers.runs import versions

CONFIGS = str(Path(__file__).parents[1] / "configs")
METHODS = {
    "plain": [],
    "light": ["explainer=tve_light"],
    "shared": ["explainer=tve_paper", "explainer.network.shared_trunk=true"],
    "paper": ["explainer=tve_paper"],
    "oracle": ["explainer=oracle", "explainer.cache_dir=null"],
}
"""What a method adds to the configuration of a target. The oracle explains one image: it takes 2 N forward passes."""

Call = Callable[[Tensor], object]


def build(target: str, methods: Sequence[str], checkpoint: str, classes: int, device: torch.device) -> dict[str, Any]:
    """The modules of all methods, on one and the same target with a head of so many classes."""
    own = [f"target={target}", "target.model.pretrained=false", f"target.model.checkpoint_path='{checkpoint}'"]
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        configs = {method: compose("train", [*own, *METHODS[method]]) for method in methods}
    modules: dict[str, Any] = {"plain": (plain := instantiate(configs["plain"].target))}
    plain.head = nn.Linear(plain.embed_dim, classes)
    for method in configs.keys() - {"plain"}:
        modules[method] = instantiate(configs[method].explainer, target=modules["plain"])
    return {method: modules[method].to(device).eval() for method in methods}


def explain(method: str, module: nn.Module, images: Tensor) -> object:
    if method == "oracle":
        return module(images[:1], torch.zeros(1, dtype=torch.long, device=images.device))
    return module(images)


def seconds(calls: Mapping[str, Call], images: Tensor, rounds: int) -> dict[str, list[float]]:
    """How long every call takes in each of the rounds that are counted: there is one more before them."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + rounds):
        for name, call in calls.items():
            wait(images.device)
            start = time.perf_counter()
            call(images)
            wait(images.device)
            taken[name].append(time.perf_counter() - start)
    return {name: each[1:] for name, each in taken.items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gflops(call: Call, image: Tensor) -> float:
    """10⁹ operations for one image (1, C, H, W); a multiplication and an addition are two."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # fused attention goes uncounted
        call(image)
    return counter.get_total_flops() / 1e9


def parameters(method: str, module: Any) -> int:
    """Of the target for `plain`, and otherwise what the method adds to it."""
    counted = {"plain": module, "oracle": nn.Identity()}.get(method) or module.network
    return sum(weight.numel() for weight in counted.parameters())


def compare_methods(modules: dict[str, Any], images: Tensor, rounds: int) -> dict[str, dict[str, Any]]:
    """Parameters, GFLOPs, images per second (median, slowest and fastest round) and their ratio to `plain`'s."""
    calls = {method: partial(explain, method, module) for method, module in modules.items()}
    taken = seconds(calls, images, rounds)
    found = {}
    for method, module in modules.items():
        rates = [(1 if method == "oracle" else len(images)) / each for each in taken[method]]
        plain = [len(images) / each for each in taken["plain"]]
        found[method] = {
            "parameters": parameters(method, module),
            "gflops_per_image": gflops(calls[method], images[:1]),
            "images_per_second": median(rates),
            "spread": [min(rates), max(rates)],
            "ratio_to_plain": median(rate / of_plain for rate, of_plain in zip(rates, plain, strict=True)),
        }
    return found


def one_by_one(tve: Any, heads: Sequence[nn.Module], images: Tensor) -> None:
    """Explain each task by itself, as if it were the only one."""
    own = tve.target.head
    for head in heads:
        tve.target.head = head
        tve(images)
    tve.target.head = own


def compare_tasks(tve: Any, images: Tensor, most: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds per image to explain T = 1, 2, 4, ... tasks: `tasks` together, `tasks_one_by_one` each by itself."""
    own = tve.target
    heads = [nn.Linear(own.embed_dim, own.num_classes).to(images.device) for _ in range(most)]
    counts = [2**i for i in range(most.bit_length())]
    calls: dict[str, Call] = {}
    for t in counts:
        calls[f"tasks {t}"] = partial(tve.explain_tasks, heads=heads[:t])
        calls[f"tasks_one_by_one {t}"] = partial(one_by_one, tve, heads[:t])
    taken = {name: median(each) / len(images) for name, each in seconds(calls, images, rounds).items()}
    return {key: {str(t): taken[f"{key} {t}"] for t in counts} for key in ("tasks", "tasks_one_by_one")}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is written with `--output`."""
    torch.set_num_threads(options.threads)
    cuda = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    device = torch.device("cuda" if cuda else "cpu")
    machine = {key: vars(options)[key] for key in ("threads", "precision", "batch_size", "rounds", "classes")}
    found: dict[str, Any] = {"machine": versions() | {"device": device_name(device)} | machine, "networks": {}}
    for target in options.target:
        methods = [name for name in METHODS if name not in options.skip]
        modules = build(target, methods, options.checkpoint, options.classes, device)
        size = modules["light"].grid.image_size
        images = torch.randint(0, 256, (options.batch_size, 3, size, size), dtype=torch.uint8, device=device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            found["networks"][target] = compare_methods(modules, images, options.rounds)
            if target == options.target[0]:
                found |= compare_tasks(modules["light"], images, options.tasks, options.rounds)
    for key, name in (("throughput", "images_per_second"), ("ratio_to_plain", "ratio_to_plain")):
        found[key] = {
            target: {method: numbers[name] for method, numbers in methods.items()}
            for target, methods in found["networks"].items()
        }
    found["ratio_light_to_plain"] = {target: ratios["light"] for target, ratios in found.pop("ratio_to_plain").items()}
    return found


def markdown(found: dict[str, Any]) -> str:
    """Two tables: the methods on every target, and the tasks."""
    lines = ["| Target | Method | Parameters (M) | GFLOPs/image | Images/s (slowest, fastest round) | of plain |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for target, methods in found["networks"].items():
        for method, of in methods.items():
            lines.append(
                f"| {target} | {method} | {of['parameters'] / 1e6:.2f} | {of['gflops_per_image']:.2f}"
                f" | {of['images_per_second']:.2f} ({of['spread'][0]:.2f}, {of['spread'][1]:.2f})"
                f" | {of['ratio_to_plain']:.2f} |"
            )
    lines += ["", "| Tasks | ms/image, together | ms/image, one by one |", "| --- | --- | --- |"]
    for tasks, together in found["tasks"].items():
        lines.append(f"| {tasks} | {1e3 * together:.2f} | {1e3 * found['tasks_one_by_one'][tasks]:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What an explanation costs, beside plain inference.")
    parser.add_argument("--target", action="append", help="of configs/target, repeatable (vit_tiny)")
    parser.add_argument("--checkpoint", default="", help="weights of the target (random)")
    parser.add_argument("--skip", action="append", default=[], choices=["shared", "paper", "oracle"], help="repeatable")
    parser.add_argument("--classes", type=int, default=10, help="of every task (10)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU (all)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5, help="that are counted (5)")
    parser.add_argument("--tasks", type=int, default=64, help="the most tasks to explain at once, on the first target")
    parser.add_argument("--output", type=Path, help="a JSON file for the numbers")
    options = parser.parse_args(arguments)
    options.target = options.target or ["vit_tiny"]
    found = measure(options)
    how = f"{options.threads} threads, {options.precision}, {options.classes} classes"
    print(f"{found['machine']['device']}, {how}\n\n{markdown(found)}")
    if options.output:
        options.output.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
