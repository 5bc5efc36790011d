"""Explaining in any mode of PyTorch, from threads, and without a trace in what belongs to the caller."""

import copy
import os
import pickle
import random
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import timm
import torch
from conftest import timm_model
from fork_server import fork, join
from safetensors.torch import save_file
from torch import nn
from toys import VECTORS

import explainers
from explainers import posthoc
from explainers.anyhead import AnyHead
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.models import as_target
from explainers.runtime import locks

IMAGES = np.random.default_rng(1).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
TENSORS = torch.from_numpy(IMAGES).permute(0, 3, 1, 2).contiguous()
SLOW = ("ScoreCAM", "ViTCX", "LIME")
FAST = {"SmoothGrad": {"samples": 2}, "GradientSHAP": {"samples": 2}, "RISE": {"masks": 60}}
CNN = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

ROUTES = {
    "GAE": lambda model, target: explainers.explain(IMAGES[0], model, method="GAE").heatmap,
    "another class": lambda model, target: explainers.explain(IMAGES[0], target, method="GAE").of(1).heatmap,
    "tensors": lambda model, target: Session(target, "AttnLRP").explain(TENSORS.clone(), [1, 2])[1].heatmap,
    "likeness": lambda model, target: explainers.compare(IMAGES[0], IMAGES[1], target).heatmap,
    "nearest": lambda model, target: explainers.nearest(IMAGES[0], IMAGES, target, k=1)[0].heatmap,
    "refined": lambda model, target: (
        explainers.refine(posthoc.build("GAE", target, target.grid), TENSORS.clone(), passes=8).more(8).heatmaps
    ),
    "plain module": lambda model, target: (
        explainers.explain(IMAGES[0], as_target(copy.deepcopy(CNN), mean=0.5, std=0.5, image_size=32)).heatmap
    ),
}


@pytest.mark.situation(44)
@pytest.mark.parametrize("route", ROUTES)
def test_every_mode_and_default_device_gives_the_same_heatmap(route):
    models = timm_model(), timm_model(as_target=True)
    expected = ROUTES[route](*models)
    for context in (torch.no_grad(), torch.device("meta")):  # the only other device that each machine has
        with context:
            assert torch.equal(ROUTES[route](*models), expected)
    with torch.inference_mode():
        inside = copy.deepcopy(models)
        found = ROUTES[route](*inside)
    assert torch.equal(found, expected)
    assert torch.equal(ROUTES[route](*inside), expected)  # a model whose weights were made inside


MODELS = {
    "ViT": timm_model,
    "plain": lambda: as_target(copy.deepcopy(CNN), mean=0.5, std=0.5, image_size=32),
}


@pytest.fixture
def float64_by_default():
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_the_default_type_of_tensors_changes_no_heatmap(kind, float64_by_default):
    model, classes, found = MODELS[kind](), torch.tensor([1, 2]), []
    for switch in (lambda: None, float64_by_default):
        switch()
        target = as_target(copy.deepcopy(model))
        names = [name for name in posthoc.methods_for(target) if name not in SLOW]
        built = {name: posthoc.build(name, target, target.grid, FAST.get(name)) for name in names}
        found.append({name: method(TENSORS, classes) for name, method in built.items()})
    for name, heatmaps in found[0].items():
        spread = heatmaps.std().item() + 1e-6
        torch.testing.assert_close(found[1][name].float(), heatmaps, rtol=1e-2, atol=1e-2 * spread, msg=name)


def test_the_default_type_of_tensors_changes_no_trained_explainer(float64_by_default, anyhead):
    images, classes = TENSORS, torch.tensor([1, 2])
    expected = anyhead(images, classes)
    float64_by_default()
    other = AnyHead(anyhead.target, anyhead.grid, VECTORS, temperature=2.0).eval()
    other.network.load_state_dict(anyhead.network.state_dict())
    torch.testing.assert_close(other(images, classes), expected)


def test_methods_for_gradients_of_stages_are_found_without_gradients():
    target = timm_model("test_resnet", as_target=True)
    with torch.no_grad():
        assert "GradCAM" in posthoc.methods_for(target)
        assert "Saliency" in posthoc.methods_for(as_target(CNN, mean=0.5, std=0.5, image_size=32))


@pytest.mark.slow
@pytest.mark.situation(34)
def test_eight_threads_share_a_model_while_others_load_one():
    target = timm_model(as_target=True)
    drawn = [{"RISE": {"masks": 16}}, {"LIME": {"samples": 20}}, {"SmoothGrad": {"samples": 2}}]
    methods = ["GAE", "DecompX-SkipPLUS", *drawn, AnyHead(target, target.grid, VECTORS).eval()]
    sessions = [Session(target, method) for method in methods]
    expected = [session.explain(IMAGES, [1, 2]) for session in sessions]

    def compute(number):
        kind = number % len(methods)
        session = Session(target, methods[kind]) if number % 9 == 0 else sessions[kind]
        if number % 5 == 0:
            as_target(timm.create_model("test_vit2", num_classes=3))
        return zip(session.explain(IMAGES, [1, 2]), expected[kind], strict=True)

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(compute, range(18)):
            for own, alone in found:
                torch.testing.assert_close(own.heatmap, alone.heatmap, rtol=1e-4, atol=1e-6)


def explain_in_a_fork_of_a_thread_that_computes(ends):
    """Exit with 0 if a fork explains as its parent does, of which a thread computes until the fork, or for ever."""
    session = Session(timm_model(as_target=True), {"RISE": {"masks": 16}})  # autograd may not work in forks
    expected = session.explain(IMAGES[0])[0].heatmap
    computing, go_on = threading.Event(), threading.Event()

    def pause(*_):
        computing.set(), hook.remove(), go_on.wait()

    hook = session.target.backbone.blocks[1].register_forward_hook(pause)
    threading.Thread(target=session.explain, args=(IMAGES[1],), daemon=True).start()
    computing.wait()
    if ends:
        os.register_at_fork(before=go_on.set)
    else:
        locks.PATIENCE = 0.01
    with warnings.catch_warnings(record=True) as said:
        child = os.fork()
    if child == 0:
        signal.alarm(100)  # if it hangs
        same = torch.allclose(session.explain(IMAGES[0])[0].heatmap, expected)
        os._exit(not same or [str(each.message) for each in said] != [locks.BUSY] * (not ends))
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.parametrize("ends", [True, False])
def test_a_fork_explains_while_a_thread_of_its_parent_computes(ends):
    process = fork(explain_in_a_fork_of_a_thread_that_computes, ends)
    join(process, 120)  # only one that hangs takes so long
    assert process.exitcode == 0


def test_random_numbers_go_on_as_without_the_call(tmp_path):
    weights = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_vit", num_classes=3).state_dict(), weights)
    states = torch.get_rng_state, np.random.get_state, random.getstate
    before = [state() for state in states]
    explainers.explain(IMAGES[0], as_target("test_vit", weights), method="ViTCX")
    after = [state() for state in states]
    assert torch.equal(before[0], after[0]) and before[2] == after[2]
    assert all(np.array_equal(*pair) for pair in zip(before[1], after[1], strict=True))


def test_explanations_comparisons_refinements_and_sessions_are_copied_and_restored():
    target = timm_model(as_target=True)
    explanation = explainers.explain(IMAGES[0], target, method="GAE")
    torch.testing.assert_close(copy.deepcopy(explanation).of(3).heatmap, explanation.of(3).heatmap)
    file = pickle.dumps(explanation)
    restored = pickle.loads(file)
    assert len(file) < 10_000  # without the model
    assert repr(restored) == repr(explanation) and torch.equal(restored.heatmap, explanation.heatmap)
    assert restored.classes == explanation.classes
    with pytest.raises(InputError, match="has no model"):
        restored.of(3 if restored.index != 3 else 2)
    comparison = explainers.compare(IMAGES[0], IMAGES[1], target)
    refinement = explainers.refine(posthoc.build("DecompX-PLUS", target, target.grid), TENSORS, passes=8)
    session = Session(target, "GAE")
    for twin in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        assert torch.equal(twin(comparison).heatmap, comparison.heatmap)
        assert torch.equal(twin(refinement).heatmaps, refinement.heatmaps)
        assert torch.equal(twin(session).explain(IMAGES)[0].heatmap, session.explain(IMAGES)[0].heatmap)
