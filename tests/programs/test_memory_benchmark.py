"""Memory and operations of steps that compute nothing: beside real steps, and for every experiment."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.fake_steps import account, build, compose_config
from benchmarks.fake_tensors import Memory, cuda_autocast


@pytest.mark.slow
def test_parts_of_the_memory_are_counted_by_hand():
    """A linear head of 2 classes, AdamW with two numbers for each weight, and the buckets of DDP."""
    several = ("experiment=demo/head", "trainer=ddp", "trainer.precision=32-true")
    found, views = account(compose_config(*several, "trainer.strategy=ddp")), account(compose_config(*several))
    width = build(compose_config(*several)).target.embed_dim
    assert found.trained == found.gradients == found.buckets == 4 * (2 * width + 2)
    assert views.gradients == 0 and views.buckets == found.buckets and views.step < found.step
    assert found.states == 2 * found.trained + 2 * 4  # two means of each weight, and two numbers of steps
    assert min(found.step, found.evaluation) >= found.frozen + found.trained + found.states + found.buckets


def test_storages_are_counted_once_and_as_long_as_they_are_alive():
    with FakeTensorMode(), Memory() as counted:
        first = torch.empty(1000)
        view = first[10:]
        doubled = view * 2
        assert counted.current == 8192
        del first, view
        assert counted.current == 4096
        del doubled
    assert (counted.current, counted.peak) == (0, 8192)


@contextmanager
def autocast_of_cuda():
    """CUDA's own autocast, which `torch.autocast` does not turn on where there is no GPU."""
    with torch.autocast("cuda", enabled=False):
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        yield


def kept(device, autocast):
    """Bytes that a forward pass keeps for the backward pass, the type of the result, and the peak."""
    with FakeTensorMode(), Memory() as counted, torch.device(device):
        layers = nn.Sequential(
            nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Softmax(-1)
        )
        images = torch.empty(8, 3, 32, 32)
        with autocast():
            hidden = layers(images)
            scores = (hidden @ hidden.mT).log_softmax(-1).pow(2) + hidden.mean((1, 2), keepdim=True)
            loss = nn.functional.cross_entropy(scores.sum(1), torch.zeros(8, dtype=torch.long))
        return counted.current, loss.dtype, counted.peak


def test_types_under_autocast_are_those_of_cuda():
    assert kept("cpu", cuda_autocast) == kept("cuda", autocast_of_cuda)
    plain = kept("cpu", lambda: torch.autocast("cpu", torch.bfloat16))
    assert plain != kept("cpu", cuda_autocast)
