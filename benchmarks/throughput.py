"""What makes a training step faster: its duration with each of several options, relative to the step as it is.

    python benchmarks/throughput.py --threads 1
    python benchmarks/throughput.py --images 64        # on a GPU, which also trains ViT-B/16

TVE with the light network and AnyHead (`configs/explainers`) train on a target with random weights and random
images, which take as long as real ones. Each option takes one step in every round; the first round is not counted. A
relative time is the median of the rounds' ratios. Without a GPU, processor time is measured, which other work on the
machine hardly changes; compilation uses no caches and one process. `as it is` is float32 with the target's weights in
channels_last. The largest difference compares what the network learns from, relative to its largest value. bf16 is
measured where the hardware computes it. On a GPU, steps of ViT-B/16 in bf16 are also compared with products of large
matrices. Compare numbers of the same run only.
"""

import argparse
import copy
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from hydra.utils import instantiate
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

from benchmarks.explain import METHODS, build, choose_device, device_name, wait
from benchmarks.fake_steps import compose_config
from explainers.learned.sources import complete
from explainers.running.defaults import fastest_precision

CASES = {"light": "TVE with the light network", "anyhead": "AnyHead"}
EXPERIMENTS = ("tve_vitb", "anyhead_vitb")
TITLES = "Option; ms/step; Relative time (smallest, largest); Largest difference"
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Option:
    """One change of a training step."""

    name: str
    target: Mapping[str, Any] = field(default_factory=dict)  # attributes of the target that are replaced
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the optimiser
    images: torch.memory_format = torch.contiguous_format
    autocast: bool = False  # whether the step computes in bf16

    def loss(self, module: Any, batch: Batch) -> Tensor:
        return self._call_with(module, batch, lambda changed: module.training_step(changed, 0))

    def rows(self, module: Any, batch: Batch) -> Batch:
        """What the network learns from."""
        return self._call_with(module, batch, lambda changed: complete(changed, module.sources))

    def _call_with(self, module: Any, batch: Batch, call: Any) -> Any:
        with ExitStack() as stack:
            for name, value in self.target.items():
                stack.enter_context(patch.object(module.explainer.target, name, value))
            stack.enter_context(torch.autocast(module.device.type, torch.bfloat16, enabled=self.autocast))
            return call(batch | {"image": batch["image"].to(memory_format=self.images)})


def options(module: Any, compiled: Any) -> tuple[list[Option], list[Option]]:
    """Two groups, float32 and bf16; the first of each is the step as it is. `compiled` is the target's `embed`."""
    half, plain = (copy.deepcopy(part) for part in (module.explainer.target, module.explainer.target.backbone))
    half.backbone.bfloat16()
    plain.to(memory_format=torch.contiguous_format)
    adamw = [Option(f"AdamW, {name}=True", optimizer={name: True}) for name in ("fused", "foreach")]
    fp32 = [
        Option("compiled target for masked images", {"embed": compiled}),
        Option("images in channels_last", images=torch.channels_last),
        Option("target's weights not in channels_last", {"backbone": plain}),
        *(adamw if "AdamW" in str(module.optimizer) else []),
    ]
    bf16 = [
        Option("autocast", autocast=True),
        Option("autocast, target's weights in bf16", {"backbone": half.backbone}, autocast=True),
        Option("masked images in bf16, no autocast", {"embed": lambda images: half.embed(images.bfloat16()).float()}),
    ]
    return [Option("as it is"), *fp32], [Option("as it is"), *bf16]


def seconds(option: Option, module: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Seconds of one step; of the processor if there is no GPU."""
    clock = time.perf_counter if module.device.type == "cuda" else processor_time
    wait(module.device)
    start = clock()
    loss = option.loss(module, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    wait(module.device)
    return clock() - start


def processor_time() -> float:
    """Seconds of the processor, for this process and the compilers that it has called."""
    return time.process_time() + sum(os.times()[2:4])


def build_optimizer(module: Any, option: Option) -> torch.optim.Optimizer:
    return module.optimizer([weight for weight in module.parameters() if weight.requires_grad], **option.optimizer)


def compare(module: Any, group: Sequence[Option], batch: Batch, rounds: int) -> Iterator[list[str]]:
    """Lines of a table: option, ms/step, relative time with its extremes, largest difference."""
    optimizers = [build_optimizer(module, option) for option in group]
    taken = []
    for _ in range(1 + rounds):
        pairs = zip(group, optimizers, strict=True)
        taken.append([seconds(option, module, optimizer, batch) for option, optimizer in pairs])
    expected = group[0].rows(module, batch)
    names = [name for name, row in expected.items() if name not in batch and row.is_floating_point()]
    for option, durations in zip(group, zip(*taken[1:], strict=True), strict=True):
        ratios = [duration / first for duration, (first, *_) in zip(durations, taken[1:], strict=True)]
        rows = option.rows(module, batch)
        difference = max((rows[name] - expected[name]).abs().max() / expected[name].abs().max() for name in names)
        ratio = f"{median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
        learned = "–" if option.optimizer else f"{difference:.2g}"
        yield [option.name, f"{1e3 * median(durations):.0f}", ratio, learned]


def compilation(compiled: Any, images: Tensor) -> Iterator[list[str]]:
    """Lines of a table: calls of a compiled function of normalised images, their sizes, seconds, new graphs."""
    count = len(images)
    chunks = [count, count - 3]  # of masked images, of which the last is smaller
    calls = {"first batch": [count], "second batch size": [count - 1], "third batch size": [count - 2]}
    calls |= {"chunks of masked images": chunks, "one image": [1], "all again": [count - 1, count - 2, *chunks, 1]}
    for name, sizes in calls.items():
        before = counters["stats"]["unique_graphs"]
        start = processor_time()
        with torch.no_grad():
            for size in sizes:
                compiled(images[:size])
        taken, graphs = processor_time() - start, counters["stats"]["unique_graphs"] - before
        yield [name, ", ".join(map(str, sizes)), f"{taken:.1f}", str(graphs)]


def matmul_rate(device: torch.device, side: int = 8192) -> float:
    """Operations per second of the product of two square matrices in bf16."""
    matrix, taken = torch.randn(side, side, device=device, dtype=torch.bfloat16), []
    for _ in range(10):
        wait(device)
        start = time.perf_counter()
        matrix @ matrix
        wait(device)
        taken.append(time.perf_counter() - start)
    return 2 * side**3 / median(taken)


def operations(option: Option, module: Any, batch: Batch) -> float:
    """Operations of the forward and backward pass of a batch, counted for its first 2 and 4 images: they are linear."""
    counted = []
    for count in (2, 4):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # fused attention is not counted
            option.loss(module, {name: row[:count] for name, row in batch.items()}).backward()
        counted.append(counter.get_total_flops())
    return counted[0] + (counted[1] - counted[0]) * (len(batch["index"]) - 2) / 2


def measure_rates(module: Any, batch: Batch, rounds: int, rate: float) -> list[str]:
    """Cells of a table: images, ms/step, TFLOP/step, TFLOP/s, and that relative to `rate`, of steps in bf16."""
    option = Option("bf16", autocast=True)
    optimizer = build_optimizer(module, option)
    taken = median([seconds(option, module, optimizer, batch) for _ in range(1 + rounds)][1:])
    count = operations(option, module, batch)
    numbers = 1e3 * taken, count / 1e12, count / taken / 1e12, count / taken / rate
    return [str(len(batch["index"])), *(f"{number:.3g}" for number in numbers)]


def markdown(titles: str, rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [titles.split("; "), ["---"] * len(rows[0]), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def list_precisions(device: str) -> list[str]:
    """Those that the hardware computes: emulated, bf16 is ten times slower than float32."""
    return ["float32", *["bf16"] * (fastest_precision(device) == "bf16-mixed")]


def random_batch(count: int, side: int, device: torch.device) -> Batch:
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, device=device)
    return {"image": images, "index": torch.arange(count, device=device)}


def trainings(target: str, modules: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Case → the training of its explainer."""
    cfgs = {case: compose_config(f"target={target}", *METHODS[case]) for case in CASES}
    return {case: prepare(instantiate(cfg.module, explainer=modules[case]), device) for case, cfg in cfgs.items()}


def prepare(module: Any, device: torch.device) -> Any:
    """The training of an explainer, which logs nothing because it has no trainer."""
    module.log = lambda *_, **__: None
    return module.to(device).train()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What makes a training step faster.")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (all)")
    parser.add_argument("--target", default="vit_tiny", help="a config of configs/target (vit_tiny)")
    parser.add_argument("--images", type=int, default=2, help="images per step (2)")
    parser.add_argument("--rounds", type=int, default=5, help="number of counted rounds (5)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; eager generates no code (inductor)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    device = choose_device(given.device)
    without = "" if len(list_precisions(given.device)) > 1 else " without bf16, which it emulates"
    line = f"{device_name(device)}{without}, torch {torch.__version__}, {given.threads} threads, {given.target}\n"
    print(line, flush=True)
    modules = build(given.target, ["plain", *CASES], "", 1000, device)
    side = modules["light"].grid.image_size
    target = modules["plain"]
    batch, compiled = random_batch(given.images, side, device), torch.compile(target.embed, backend=given.backend)
    trained = trainings(given.target, modules, device)
    groups = {name: options(trained[case], compiled) for case, name in CASES.items()}
    with patch("torch.compiler.config.force_disable_caches", True), inductor.patch(compile_threads=1):
        rows = list(compilation(compiled, target.normalise(random_batch(8, side, device)["image"])))
        print(markdown("Calls of the compiled target; Images; Processor time (s); New graphs", rows), flush=True)
        for turn, precision in enumerate(list_precisions(given.device)):
            for (name, group), case in zip(groups.items(), CASES, strict=True):
                rows = list(compare(trained[case], group[turn], batch, given.rounds))
                print(f"{name}, {precision}\n\n{markdown(TITLES, rows)}", flush=True)
    if device.type == "cuda":
        rate = matmul_rate(device)
        print(f"Product of 8192 × 8192 matrices in bf16: {rate / 1e12:.0f} TFLOP/s\n")
        rows = []
        for experiment in EXPERIMENTS:
            cfg = compose_config(f"experiment={experiment}")
            module = prepare(instantiate(cfg.module), device)
            large = random_batch(cfg.data.batch_size, module.explainer.grid.image_size, device)
            rows.append([experiment, *measure_rates(module, large, given.rounds, rate)])
        print(markdown("Experiment; Images; ms/step; TFLOP/step; TFLOP/s; Of the product", rows))


if __name__ == "__main__":
    main()
