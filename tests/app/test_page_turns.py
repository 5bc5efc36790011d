"""Who may use the model on the page: short computations never wait for slow ones, and nobody's weights are copied."""

import threading

import anyio
import pytest
import torch
from fork_server import PATIENCE

from explainers.app.choosing import estimate_passes
from explainers.app.page.api import Api, server_functions
from explainers.app.page.images import ImageStore
from explainers.app.page.turns import LEFT, Turns, VisitorLeft
from explainers.app.session import Session
from explainers.posthoc import build
from explainers.posthoc.names import build_supported

BEGUN = threading.Event()
"""Set once a slow method computes; copies of methods share it."""


class Slow:
    """Explains by endless passes of the model."""

    forward_passes = 500

    def __init__(self, target):
        self.target = target

    @torch.no_grad()
    def __call__(self, images, classes=None):
        while True:  # until its visitor leaves: who waits for its end waits for ever
            self.target(images)
            BEGUN.set()


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
    turns, left = Turns(), threading.Event()

    def compute():
        LEFT.set(left)
        with pytest.raises(VisitorLeft), turns.take_turn(Slow(target), target) as explainer:
            explainer(image)

    def take_turns():
        for _ in range(5):
            with turns.turn():
                pass

    BEGUN.clear()
    threads = [threading.Thread(target=compute, daemon=True) for _ in range(3)]
    short = threading.Thread(target=take_turns, daemon=True)
    for thread in threads:
        thread.start()
    assert BEGUN.wait(PATIENCE)
    short.start()
    short.join(PATIENCE)
    assert not short.is_alive() and all(thread.is_alive() for thread in threads)
    left.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    with turns.turn():  # nobody holds the model
        pass


def test_a_page_that_closes_waits_until_nobody_computes(target, image):
    turns, computing, ended = Turns(), threading.Event(), []

    def compute(explainer):
        with pytest.raises(VisitorLeft), turns.take_turn(explainer, target) as taken:
            computing.set()
            taken(image)
        ended.append(explainer)

    threads = [threading.Thread(target=compute, args=(Slow(target),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    computing.wait()
    turns.close()
    for thread in threads:
        thread.join()
    with pytest.raises(VisitorLeft), turns.turn():
        pass
    assert len(ended) == 2


class Request:
    """A request of a browser that leaves."""

    def __init__(self, leaves):
        self.leaves = leaves

    async def is_disconnected(self):
        return self.leaves.is_set()


@pytest.mark.slow
def test_visitors_who_leave_end_their_computations(target):
    pytest.importorskip("gradio")
    session = Session(target, "Chance")
    api = Api(session, {"Slow": Slow(session.target)}, ImageStore())
    key = api.open_image({})["key"]
    heatmap = next(reply for reply in server_functions(api) if reply.__name__ == "heatmap")
    answers, leave = {}, threading.Event()

    async def ask(name, method, leaves):
        answers[name] = await heatmap({"key": key, "method": method, "index": 0}, Request(leaves))

    async def visit():
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(ask, number, "Slow", leave)
                await anyio.to_thread.run_sync(BEGUN.wait, PATIENCE)
                await ask("short", "Chance", threading.Event())
                leave.set()  # all of them would compute for ever

    BEGUN.clear()
    anyio.run(visit)
    assert "tiles" in answers["short"]
    assert not any("tiles" in answers[number] for number in range(20))
