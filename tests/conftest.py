"""What all tests share.

The controller of pytest-xdist reads this file before it starts the processes that test, and needs no torch: what
takes seconds to import is imported where it is used.
"""

import atexit
import gc
import logging
import os
import signal
from collections import defaultdict
from functools import cache, partial
from itertools import islice
from pathlib import Path

import pytest
import yaml

yaml.SafeLoader = yaml.CSafeLoader  # Hydra reads configs by a parser in C
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts `make test &` so, and commands inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until the first test: imports and the collection of tests leave hardly any garbage

VITS = {
    "scaled": ("vit_tiny_patch16_224", {"init_values": 0.5, "depth": 3}),  # the middle of 3 layers is 2
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "average": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
}
TINY_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="no slow tests and none of programs; of each its first parameters"
    )


def pytest_collection_modifyitems(config, items):
    """Choose the tests of `--quick`; of all tests, give each process the slow ones of some files first.

    pytest-xdist hands each process a part of the list; an idle one gets tests of another only between two tests.
    """
    if not config.getoption("quick"):
        processes = getattr(config, "workerinput", {}).get("workercount", 1)
        slow = [item for item in items if item.get_closest_marker("slow")]
        files = list(dict.fromkeys(item.path for item in slow))
        others = iter([item for item in items if not item.get_closest_marker("slow")])
        parts = [[item for item in slow if files.index(item.path) % processes == i] for i in range(processes)]
        size = len(items) // processes
        items[:] = [each for part in parts for each in (*part, *islice(others, max(size - len(part), 0)))] + [*others]
        return
    chosen = {}
    for item in items:
        if not item.get_closest_marker("slow") and item.path.parent.name != "programs":  # which start whole programs
            chosen.setdefault((item.path, getattr(item, "originalname", None) or item.name), item)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen.values()])
    items[:] = chosen.values()


def pytest_unconfigure(config):
    """Print last what could not be tested, and why."""
    if reporter := config.pluginmanager.get_plugin("terminalreporter"):
        files = defaultdict(set)
        for report in reporter.stats.get("skipped", []):
            files[report.longrepr[2].removeprefix("Skipped: ")].add(Path(report.nodeid.partition("::")[0]).stem)
        reasons = [f"tests in {', '.join(sorted(names))} ({reason})" for reason, names in files.items()]
        if reasons:
            reporter.write_line(f"not tested here: {'; '.join(reasons)}")


def wake(model, seed=0):
    """Give weights of the size that training gives: a fresh timm model answers nearly the same to every image."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(1.5 * noise / weight[0].numel() ** 0.5)
            else:
                weight.copy_(0.3 * noise + (0 if name.endswith("bias") else 1))
        for name, statistic in model.named_buffers():
            if name.endswith("running_mean"):
                statistic.add_(0.3 * torch.randn(statistic.shape, generator=generator))
    return model


@cache
def built(name, seed, num_classes, arguments, as_target):
    import timm
    from copies import Copies

    from explainers.models import TargetModel

    model = wake(timm.create_model(name, num_classes=num_classes, **dict(arguments)), seed).eval()
    return Copies(TargetModel(model).eval()) if as_target else Copies(model)


def timm_model(name="vit_tiny_patch16_224", seed=0, num_classes=5, as_target=False, **arguments):
    """A small timm model, or a target, with lively random weights, in eval mode; a tiny ViT unless told otherwise."""
    if "vit" in name or "deit" in name:
        arguments = TINY_VIT | arguments
    return built(name, seed, num_classes, tuple(arguments.items()), as_target)()


@pytest.fixture(autouse=True, scope="session")
def independent_forks():
    """Let no fork wait for what it lacks: the threads of OpenMP, or a lock of progress bars that a killed fork held."""
    import threading

    import torch
    from tqdm import tqdm

    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    os.register_at_fork(after_in_child=lambda: tqdm.set_lock(threading.RLock()))


@pytest.fixture(autouse=True, scope="session")
def forks_of_a_clean_process(independent_forks):
    """Start the server of `fork_server` before any test."""
    import fork_server

    fork_server.start()


@pytest.fixture(autouse=True, scope="module")
def threads(independent_forks):
    """Use one thread: on a busy machine, several wait for each other far longer than they compute.

    OMP_NUM_THREADS alone is not enough: torch takes at most as many threads as there are cores, and the benchmarks that
    earlier tests call choose their own.
    """
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Keep hashes of files in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def collecting():
    """Collect garbage, but not in what is imported, which takes seconds; at exit, nanobind reports what is left."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True, scope="module")
def frozen(collecting):
    """Hide what is imported, and what earlier tests keep, from the garbage collector, which then is faster."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def signals_restored():
    """Restore the handlers of signals that a program installs in this process; a fork would inherit them."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
    earlier = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in earlier.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def root_logger_restored():
    """Restore the logger that Hydra configures for the whole process: the level that it leaves hides warnings."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    if root.level != level:
        root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def no_sockets(monkeypatch):
    """Fail at any attempt to open a connection or to look up an address; the list of attempts."""
    import socket

    attempts = []

    def refused(*args, **settings):
        attempts.append(args)
        raise OSError("no connection in this test")

    for name in ("create_connection", "getaddrinfo", "gethostbyname"):
        monkeypatch.setattr(socket, name, refused)
    monkeypatch.setattr(socket.socket, "connect", refused)
    return attempts


@pytest.fixture
def make_model():
    return timm_model


@pytest.fixture
def make_target():
    return partial(timm_model, as_target=True)


@pytest.fixture
def target(make_target):
    """A ViT of width 24 that sees 32 × 32 pixels in 4 × 4 patches and tells 5 classes apart."""
    return make_target()


@pytest.fixture
def grid():
    from explainers.masking import PatchGrid

    return PatchGrid(image_size=32, patch_size=8)


@pytest.fixture
def anyhead(target):
    """An AnyHead of this ViT, or of another `target`, with lively random weights."""
    from toys import VECTORS

    from explainers.anyhead import AnyHead

    explainer = AnyHead(target, target.grid, VECTORS, temperature=2.0)
    wake(explainer.network)
    return explainer.eval().requires_grad_(False)


@pytest.fixture
def nothing_shipped(tmp_path, monkeypatch):
    """No trained explainer is shipped, and no line was printed before."""
    from explainers.app import choosing
    from explainers.share import catalogue

    monkeypatch.setattr(catalogue, "SHIPPED", tmp_path / "shipped")
    choosing.print_once.cache_clear()


@pytest.fixture
def three_files(target, grid, tmp_path):
    """Files of the three models of a transfer, by their role."""
    from toys import three_models

    return three_models(target, grid, tmp_path)


@pytest.fixture
def images():
    import torch

    return torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=VITS)
def double(request, make_target):
    """Small ViTs of all kinds in double precision."""
    from references_propagation import in_double

    name, arguments = VITS[request.param]
    return in_double(make_target(name, **arguments))


@pytest.fixture
def additive(target, monkeypatch):
    """A target whose embedding is a sum over patches; and what each of them adds, of normalised images, (B, N, D)."""
    import torch

    weight = torch.randn(16, 24)

    def parts(normalised):
        return normalised.mean(1).unfold(1, 8, 8).unfold(2, 8, 8).mean((-1, -2)).flatten(1)[..., None] * weight

    monkeypatch.setattr(target, "embed", lambda normalised: parts(normalised).sum(1))
    return target, parts
