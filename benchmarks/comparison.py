"""Time and memory of a call relative to another, in one run; `benchmarks/posthoc.py` explains what is counted."""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from benchmarks.explain import wait

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler warns about missing GPUs
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Comparison:
    """Two calls, each with the number of images that it explains."""

    name: str  # what this project does
    beside: str  # what it is compared with
    ours: tuple[Call, int]
    other: tuple[Call, int]
    same: bool = True  # whether both compute equal heatmaps for the images that both explain
    time_aim: float | None = None  # largest relative time that is aimed at
    memory_aim: float | None = None


def peak_memory(call: Call, device: torch.device) -> tuple[Tensor, int]:
    """The result of a call, and its peak memory in bytes, without what was allocated before."""
    gc.collect()  # garbage of earlier calls, freed during this call, would lower its peak
    if device.type == "cuda":
        wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        return result, torch.cuda.max_memory_allocated(device) - before
    with profile(profile_memory=True, use_kineto=False) as profiler:
        result = call()
    events: Any = profiler.kineto_results
    in_order = sorted(events.events(), key=lambda event: event.start_ns())
    sizes = torch.tensor([0, *(event.nbytes() for event in in_order if event.name() == "[memory]")])
    return result, int(sizes.cumsum(0).max())


def compare(comparison: Comparison, rounds: int, seconds: float, device: torch.device) -> dict[str, Any]:
    """Milliseconds and bytes per image of both calls, their ratios, and the largest difference of their results.

    There are at least so many rounds, in which both run once, and so many seconds.
    """
    calls = comparison.ours, comparison.other
    (ours, our_bytes), (other, other_bytes) = (peak_memory(call, device) for call, _ in calls)
    taken: list[list[float]] = [[], []]
    end = time.perf_counter() + seconds
    while len(taken[0]) < rounds or time.perf_counter() < end:
        for durations, (call, images) in zip(taken, calls, strict=True):
            wait(device)
            start = time.perf_counter()
            call()
            wait(device)
            durations.append((time.perf_counter() - start) / images)
    ratios = [mine / theirs for mine, theirs in zip(*taken, strict=True)]
    count = min(len(ours), len(other))
    difference = (ours[:count] - other[:count]).abs().max() / other[:count].abs().max().clamp(min=1e-30)
    memory = our_bytes / comparison.ours[1], other_bytes / comparison.other[1]
    return {
        "beside": comparison.beside,
        "ms_per_image": [1e3 * median(durations) for durations in taken],
        "relative_time": median(ratios),
        "spread": [min(ratios), max(ratios)],
        "rounds": len(ratios),
        "time_aim": comparison.time_aim,
        "bytes_per_image": list(memory),
        "relative_memory": memory[0] / memory[1],
        "memory_aim": comparison.memory_aim,
        "largest_difference": difference.item() if comparison.same else None,
    }
