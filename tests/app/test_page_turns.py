"""Who may use the model on the page: short computations never wait for slow ones, and nobody's weights are copied."""

import threading
import time

import anyio
import pytest
import torch

from explainers.app.choosing import estimate_passes
from explainers.app.page.api import Api, server_functions
from explainers.app.page.images import ImageStore
from explainers.app.page.turns import LEFT, Turns, VisitorLeft
from explainers.app.session import Session
from explainers.posthoc import build
from explainers.posthoc.names import build_supported


class Slow:
    """Explains by many passes of the model."""

    forward_passes = 500

    def __init__(self, target):
        self.target = target

    @torch.no_grad()
    def __call__(self, images, classes=None):
        for _ in range(self.forward_passes):
            self.target(images)
            time.sleep(0.002)
        return torch.zeros(1, *self.target.grid.shape)


FEW = {"RISE": {"masks": 20}, "LIME": {"samples": 20}}


@pytest.fixture
def image():
    return torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def slow_methods(target):
    return [name for name, method in build_supported(target).items() if estimate_passes(method) > 10]


@pytest.mark.slow
def test_copies_of_slow_methods_give_way_and_compute_the_same(target, image, monkeypatch):
    turns, waits = Turns(), []
    monkeypatch.setattr(turns, "_give_way", lambda: waits.append(1))
    for name in slow_methods(target):
        method = build(name, target, target.grid, FEW.get(name))
        waits.clear()
        with turns.take_turn(method, target) as copied:
            assert copied is not method
            torch.testing.assert_close(copied(image, torch.tensor([1])), method(image, torch.tensor([1])))
        assert waits, name
        weights = {parameter.data_ptr() for parameter in target.parameters()}
        assert {parameter.data_ptr() for parameter in copied.parameters()} <= weights
    assert not any(module._forward_pre_hooks for module in target.modules())


def test_a_short_computation_does_not_wait_for_slow_ones(target, image):
    turns, started = Turns(), threading.Barrier(4)

    def compute():
        left = threading.Event()
        LEFT.set(left)
        lefts.append(left)
        started.wait()
        with pytest.raises(VisitorLeft), turns.take_turn(Slow(target), target) as explainer:
            explainer(image)

    lefts = []
    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    time.sleep(0.1)
    start = time.perf_counter()
    for _ in range(5):
        with turns.turn():
            pass
    assert time.perf_counter() - start < 0.5  # three slow ones take 3 seconds
    for left in lefts:
        left.set()
    for thread in threads:
        thread.join(1)
    assert not any(thread.is_alive() for thread in threads)
    with turns.turn():  # nobody holds the model
        pass


class Request:
    """A request of a browser that leaves."""

    def __init__(self, leaves_after):
        self.leaves = time.perf_counter() + leaves_after

    async def is_disconnected(self):
        return time.perf_counter() > self.leaves


@pytest.mark.slow
def test_visitors_who_leave_end_their_computations(target):
    pytest.importorskip("gradio")
    session = Session(target, "Chance")
    api = Api(session, {"Slow": Slow(session.target)}, ImageStore())
    key = api.open_image({})["key"]
    heatmap = next(reply for reply in server_functions(api) if reply.__name__ == "heatmap")
    answers = {}

    async def ask(name, method, leaves_after):
        answers[name] = await heatmap({"key": key, "method": method, "index": 0}, Request(leaves_after))
        answers[name]["at"] = time.perf_counter()

    async def visit():
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(ask, number, "Slow", 0.3)
            tasks.start_soon(ask, "short", "Chance", 60)

    start = time.perf_counter()
    anyio.run(visit)
    assert time.perf_counter() - start < 3  # all of them would take 20 seconds
    assert "tiles" in answers["short"] and answers["short"]["at"] < start + 1
    assert not any("tiles" in answers[number] for number in range(20))
