"""Cost of an explanation, relative to the target's own inference and for a growing number of tasks.

    python benchmarks/explain.py                                               # ViT-Ti/16
    python benchmarks/explain.py --target vit_base --target swin_base --precision bf16 --output explain.json
    python benchmarks/explain.py --baselines --target vit_base --target resnet101    # TVE, Figure 6

`--baselines` adds those of the TVE paper (`experiment=papers/tve`). `plain` is a prediction without an explanation.
Every other method explains the predicted class of each image, `anyhead_all_classes` every class. The methods are built
from `configs/` with random weights, which do not change the speed. In every round each method runs once, so that other
work on the machine slows all methods alike. The first round is not counted. Compare numbers of the same run only.
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
from hydra.utils import instantiate
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # configs may name modules of this folder that are not installed

from explainers import posthoc
from explainers.posthoc.pixel_gradients import PixelExplainer
from explainers.report.tables import markdown
from explainers.running.targets import compose_config
from explainers.saved.records import versions

METHODS = {
    "plain": [],
    "light": ["explainers@explainer=tve"],
    "anyhead": ["explainers@explainer=anyhead"],
    "anyhead_all_classes": ["explainers@explainer=anyhead"],
    "shared": ["explainers@explainer=tve_paper", "explainer.network.shared_trunk=true"],
    "paper": ["explainers@explainer=tve_paper"],
    "oracle": ["explainers@explainer=oracle", "explainer.cache_dir=null"],
}
"""Method → overrides of the target's config. The oracle explains one image only: it takes 2 N forward passes."""

Call = Callable[[Tensor], object]


def build(target: str, methods: Sequence[str], checkpoint: str, classes: int, device: torch.device) -> dict[str, Any]:
    """Method, one of METHODS → its module. All explain the same target, a config in configs/target.

    Its weights are those of the file `checkpoint`, or random; its head has so many `classes`.
    """
    overrides = [f"target={target}", "target.model.pretrained=false", f"target.model.checkpoint_path='{checkpoint}'"]
    configs = {method: compose_config("train", [*overrides, *METHODS[method]]) for method in methods}
    modules: dict[str, Any] = {"plain": (plain := instantiate(configs["plain"].target))}
    plain.head = nn.Linear(plain.embed_dim, classes)
    for method in configs.keys() - {"plain"}:
        modules[method] = instantiate(configs[method].explainer, target=modules["plain"])
    return {method: modules[method].to(device).eval() for method in methods}


def build_baselines(name: str, target: Any) -> dict[str, Any]:
    """Method → its module, for the baselines of the TVE paper, with the settings of `experiment=papers/tve`."""
    network = "vit_shapley" if isinstance(target.backbone, VisionTransformer) else "shapley_light"
    overrides = [f"target={name}", f"explainers@explainers.vit_shapley.explainer={network}"]
    cfg = compose_config("eval", ["experiment=papers/tve", *overrides])
    learned = {"kernel_shap": cfg.explainers.kernel_shap, network: cfg.explainers.vit_shapley.explainer}
    learned[network].weights = None
    modules = {method: instantiate(node, target=target) for method, node in learned.items()}
    methods = posthoc.build_all(cfg.methods, target, instantiate(cfg.grid))
    device = target.mean.device
    return {name.partition("(")[0]: module.to(device).eval() for name, module in (modules | methods).items()}


def explain(method: str, module: Any, images: Tensor) -> object:
    """Run a method on uint8 images (B, 3, S, S); the oracle on the first image only."""
    if method == "anyhead_all_classes":
        return module.all_classes(images)
    if method in METHODS and method != "oracle":
        return module(images)
    given = images[:1] if method == "oracle" else images
    return module(given, torch.zeros(len(given), dtype=torch.long, device=images.device))


def seconds(
    calls: Mapping[Any, Call],
    images: Tensor,
    rounds: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, list[float]]:
    """Seconds of every call in each of `rounds` rounds, in which calls take turns, after `warm_up` uncounted rounds."""
    taken: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(warm_up + rounds):
        for name, call in calls.items():
            wait(images.device)
            start = clock()
            call(images)
            wait(images.device)
            taken[name].append(clock() - start)
    return {name: durations[warm_up:] for name, durations in taken.items()}


def choose_device(choice: str) -> torch.device:
    """The device of an option `--device`: auto takes a GPU if there is one."""
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(auto if choice == "auto" else choice)


def wait(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gflops(call: Call, image: Tensor) -> float:
    """Operations for one image (1, C, H, W), in 10⁹; a multiplication and an addition are two operations."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # fused attention is not counted
        call(image)
    return counter.get_total_flops() / 1e9


def parameters(method: str, module: Any) -> int:
    """Number of parameters: of the target for `plain`, otherwise of the network that the method adds to it."""
    network = module if method == "plain" else getattr(module, "network", nn.Identity())
    return sum(weight.numel() for weight in network.parameters())


def compare_methods(modules: dict[str, Any], images: Tensor, rounds: int) -> dict[str, dict[str, Any]]:
    """Parameters, GFLOPs and speed of every method.

    Returns:
        Method → `parameters`, `gflops_per_image`, `images_per_second` (median of the rounds), `spread` (slowest and
        fastest round) and `ratio_to_plain` (median of the ratios to the speed of `plain` in the same round).
    """
    calls = {method: partial(explain, method, module) for method, module in modules.items()}
    taken = seconds(calls, images, rounds)
    costs = {}
    for method, module in modules.items():
        rates = [(1 if method == "oracle" else len(images)) / duration for duration in taken[method]]
        plain = [len(images) / duration for duration in taken["plain"]]
        costs[method] = {
            "parameters": parameters(method, module),
            # Gradients within a forward pass cannot be counted
            "gflops_per_image": None if isinstance(module, PixelExplainer) else gflops(calls[method], images[:1]),
            "images_per_second": median(rates),
            "spread": [min(rates), max(rates)],
            "ratio_to_plain": median(rate / plain_rate for rate, plain_rate in zip(rates, plain, strict=True)),
        }
    return costs


def explain_one_by_one(tve: Any, heads: Sequence[nn.Module], images: Tensor) -> None:
    """Explain each task separately, as if it were the only one, then restore the target's head."""
    fix_own_head = tve.target.head
    for head in heads:
        tve.target.head = head
        tve(images)
    tve.target.head = fix_own_head


def compare_tasks(tve: Any, images: Tensor, most: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds per image to explain T = 1, 2, 4, ... tasks, with at most `most` tasks.

    Returns:
        `tasks`: T → seconds if all tasks are explained together; `tasks_one_by_one`: T → seconds if each is explained
        separately.
    """
    target = tve.target
    heads = [nn.Linear(target.embed_dim, target.num_classes).to(images.device) for _ in range(most)]
    counts = [2**i for i in range(most.bit_length())]
    calls: dict[str, Call] = {}
    for t in counts:
        calls[f"tasks {t}"] = partial(tve.explain_tasks, heads=heads[:t])
        calls[f"tasks_one_by_one {t}"] = partial(explain_one_by_one, tve, heads[:t])
    taken = {name: median(durations) / len(images) for name, durations in seconds(calls, images, rounds).items()}
    return {key: {str(t): taken[f"{key} {t}"] for t in counts} for key in ("tasks", "tasks_one_by_one")}


def device_name(device: torch.device) -> str:
    """Product name of the GPU or the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All measured numbers, the settings and the machine, as written by `--output`."""
    torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    machine = {key: vars(options)[key] for key in ("threads", "precision", "batch_size", "rounds", "classes")}
    results: dict[str, Any] = {"machine": versions() | {"device": device_name(device)} | machine, "networks": {}}
    for target in options.target:
        methods = [name for name in METHODS if name not in options.skip]
        modules = build(target, methods, options.checkpoint, options.classes, device)
        if options.baselines:
            modules |= build_baselines(target, modules["plain"])
        size = modules["light"].grid.image_size
        images = torch.randint(0, 256, (options.batch_size, 3, size, size), dtype=torch.uint8, device=device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            results["networks"][target] = compare_methods(modules, images, options.rounds)
            if target == options.target[0]:
                results |= compare_tasks(modules["light"], images, options.tasks, options.rounds)
    for key, name in (("throughput", "images_per_second"), ("ratio_to_plain", "ratio_to_plain")):
        results[key] = {
            target: {method: numbers[name] for method, numbers in methods.items()}
            for target, methods in results["networks"].items()
        }
    ratios = results.pop("ratio_to_plain")
    results["ratio_light_to_plain"] = {target: ratio["light"] for target, ratio in ratios.items()}
    return results


def tables(results: dict[str, Any]) -> str:
    """Two tables: the methods on every target, and the numbers of tasks."""
    methods = [
        {
            "Target": target,
            "Method": method,
            "Parameters (M)": f"{costs['parameters'] / 1e6:.2f}",
            "GFLOPs/image": "–" if costs["gflops_per_image"] is None else f"{costs['gflops_per_image']:.2f}",
            "Images/s (extremes)": "{:.2f} ({:.2f}, {:.2f})".format(costs["images_per_second"], *costs["spread"]),
            "Relative to plain": f"{costs['ratio_to_plain']:.2f}",
        }
        for target, of_target in results["networks"].items()
        for method, costs in of_target.items()
    ]
    names = {"tasks": "ms/image, together", "tasks_one_by_one": "ms/image, one by one"}
    tasks = [
        {"Tasks": count} | {title: f"{1e3 * results[key][count]:.2f}" for key, title in names.items()}
        for count in results["tasks"]
    ]
    return f"{markdown(methods)}\n{markdown(tasks)}"


def parser_of(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all measurements of time share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (all)")
    parser.add_argument("--output", type=Path, help="JSON file for the numbers")
    return parser


def finish(results: dict[str, Any], settings: str, table: str, output: Path | None) -> None:
    """Print a table below the machine and the settings, and write the numbers to `--output`."""
    print(f"{results['machine']['device']}, {settings}\n\n{table.rstrip()}")
    if output:
        output.write_text(json.dumps(results, indent=2), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("Cost of an explanation, relative to plain inference.")
    parser.add_argument("--target", action="append", help="a config of configs/target, repeatable (vit_tiny)")
    parser.add_argument("--checkpoint", default="", help="weights file of the target (random weights)")
    parser.add_argument(
        "--skip", action="append", default=[], choices=["shared", "paper", "oracle"], help="method, repeatable"
    )
    parser.add_argument("--baselines", action="store_true", help="also the baselines of the TVE paper")
    parser.add_argument("--classes", type=int, default=10, help="number of classes of every task (10)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--batch-size", type=int, default=16, help="images per batch (16)")
    parser.add_argument("--rounds", type=int, default=5, help="number of counted rounds (5)")
    parser.add_argument("--tasks", type=int, default=64, help="maximum number of tasks, on the first target (64)")
    options = parser.parse_args(arguments)
    options.target = options.target or ["vit_tiny"]
    results = measure(options)
    settings = f"{options.threads} threads, {options.precision}, {options.classes} classes"
    finish(results, settings, tables(results), options.output)


if __name__ == "__main__":
    main()
