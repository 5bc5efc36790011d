"""Every key that a config accepts has an effect: nonsense in its place is an error, or changes what is built."""

import contextlib
import inspect
import io
import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from commands import composed
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict

import eval as evaluation
import train as training
from explainers.running import trainer

ALL = "chance,anyhead,kernel_shap,oracle,tve,tve_hg,tve_paper,tve_untrained,vit_shapley,vit_shapley_general"
FILES = ("figures.passes.passes={a:1}", "figures.passes.one=[b]")
FILES += tuple(f"figures.{name}.files={{a:x}}" for name in ("lambdas", "losses"))
FILES += tuple(f"figures.{name}.file=x" for name in ("cost", "theorem1", "throughput"))
CONFIGS = {
    "eval": ("eval", "tasks=[digits]"),
    "eval explainers": ("eval", f"explainers=[{ALL}]", "tasks=[imagenet_val,folder,cifar100,mura]", "logger=wandb"),
    "eval masks": ("eval", "tasks=[masks,class_masks,coco]"),
    "eval figures": (
        "eval",
        "tasks=[digits]",
        "figures=[ablation,approximation,bars,cost,curves,lambdas,losses,passes,radar,ranking,similarity,theorem1,throughput]",
        "figures.similarity.folder=x",
        *FILES,
        "reference=paper",
        "trainer=ddp",
        "methods=[{TokenTM:{scale:softmax}}]",
    ),
    "eval two points": ("eval", "tasks=[imagenet_val]", "metrics=two_point", "figures=approximation"),
    "eval vectors": ("eval", "experiment=quickstart_vectors_eval"),
    "train": ("train", "data=digits"),
    "train cached": ("train", "experiment=anyhead_vit_tiny"),
    "train white box": (
        "train",
        "experiment=anyhead_vit_tiny",
        "teacher@explainer.teacher=propagation",
        "logger=wandb",
    ),
    "train head": ("train", "experiment=linear_head"),
    "train surrogate": ("train", "experiment=surrogate"),
    "train shapley": ("train", "experiment=vit_shapley", "trainer=gpu"),
    "train fastshap": ("train", "experiment=vit_shapley", "explainers@explainer=fastshap", "debug=profile"),
    "train light": ("train", "experiment=vit_shapley", "explainers@explainer=shapley_light", "cache=none"),
    "train explaining": ("train", "experiment=self_explaining", "data=cifar100"),
    "train vector": ("train", "experiment=explainability_vector"),
    "train imagenet": ("train", "experiment=tve_vitb", "debug=overfit"),
}
SHARED = {
    "blocks": "of the target; networks that read features read it",
    "direct": "of the target; the network of AnyHead reads it",
    "data_dir": "data sets on disk read it",
    "cache_dir": "cache=sources and the oracle read it",
    "seed": "all that draws reads it",
    "name": "the run's folder has it (hydra.run.dir); W&B and progress read it",
    "objective": "checkpoints, progress and sweeps read it",
}
"""Keys that parts of a config read by interpolation; an experiment without these parts has no reader of them."""

OF_TASKS = "a default of tasks; each of them sets its own"
EXCEPTIONS = {
    "train head": {"grid._target_": "no grid is built; its image_size is read"},
    "eval vectors": {
        "target.head": OF_TASKS,
        "explainers.no_transfer.weights": OF_TASKS,
        "explainers.no_transfer_scaled.weights": OF_TASKS,
        "explainers.transferred.weights": OF_TASKS,
    },
}
"""Config → key → why nothing reads it there."""


def leaves(node, path=""):
    """(Dotted path, whether it is an interpolation) of every leaf; a list is one."""
    for name in node:
        part = node._get_node(name)
        own = f"{path}.{name}".lstrip(".")
        if isinstance(part, DictConfig) and not part._is_none() and not part._is_interpolation() and len(part):
            yield from leaves(part, own)
        else:
            yield own, part._is_interpolation()


class Trace:
    """Stands in for `instantiate`: it keeps what would be built, and checks that the arguments exist."""

    def __init__(self):
        self.built = []

    def __call__(self, node, *args, **given):
        if node is None:
            return None
        plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else dict(node)
        plain = {name: value for name, value in plain.items() if name not in given}
        signature(plain, len(args), given)
        self.built.append(plain | {name: value for name, value in given.items() if isinstance(value, str)})
        return Built(self.built)


class Built:
    """Has all that the programs ask of what they build, and does nothing."""

    num_nodes, is_global_zero, loggers, scores = 1, False, (), None

    def __init__(self, built):
        self.results, self.columns, self.forward_passes, self.callback_metrics, self.explainers = {}, {}, {}, {}, {}
        self.scores = None
        for name in ("fit", "validate", "test"):
            setattr(self, name, lambda *_, name=name, **settings: built.append([name, str(settings)]))

    def __call__(self, **_):
        return self

    def __getattr__(self, name):
        return MagicMock()

    def fingerprint(self, *_):
        return {}

    identity = class_names = fingerprint

    def size(self, _):
        return 7

    def savefig(self, path, **_):
        Path(path).touch()


def signature(plain, positional=0, given=()):
    """Raise a TypeError for an argument that what a node names does not take; a marked name takes any."""
    if isinstance(plain, dict):
        if not str(plain.get("_target_", "nonsense")).startswith("nonsense"):
            names = {name for name in plain if not name.startswith("_")} | set(given)
            inspect.signature(get_object(plain["_target_"])).bind_partial(*[None] * positional, **dict.fromkeys(names))
        for value in plain.values():
            signature(value)


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Run a program without its work → what it would have built, as text; an error is one, too."""

    def build(program, cfg, checks=True):
        trace = Trace()
        with monkeypatch.context() as patch:
            for module in (training, evaluation, trainer):
                patch.setattr(module, "instantiate", trace)
            patch.setattr(evaluation.posthoc, "build_all", lambda methods, *_: trace.built.append(str(methods)) or {})
            patch.setattr(evaluation, "publish_results", lambda *args: trace.built.append(str([args[1], *args[3:]])))
            for name, result in (("launch", False), ("start_record", None), ("check_number_of_images", None)):
                for module in (training, evaluation):
                    patch.setattr(module, name, lambda *_, result=result, **__: result)
            for module in (training, evaluation):
                patch.setattr(module, "seed_everything", lambda seed, **_: trace.built.append(seed))
            patch.setattr(trainer, "accelerator_of", lambda accelerator: accelerator)
            patch.setattr(training, "is_overridden", lambda *_: True)
            patch.setattr(evaluation, "total_processes", lambda _: 1)
            patch.setattr(evaluation, "tell_corrupt", lambda *_: None)
            if not checks:
                follow = {
                    "image_size": 224,
                    "patch_size": 16,
                    "blocks": [0],
                    "direct": [0],
                    "four_blocks": [0],
                }  # of a nonsense model
                patch.setattr("explainers.running.targets._that_follow", lambda *_: follow)
                patch.setattr("explainers.running.keys.check_types", lambda *_, **__: None)
                patch.setattr("explainers.running.keys.check_precision", lambda _: None)
            out = io.StringIO()
            try:
                with contextlib.redirect_stdout(out):
                    (training.train if program == "train" else evaluation.evaluate)(cfg)
            except Exception as error:
                if not checks:
                    raise
                return f"{type(error).__name__}: {error}"
            finally:
                (tmp_path / "results.json").unlink(missing_ok=True)
        return f"{trace.built} {[line.partition(':')[0] for line in out.getvalue().splitlines()]}"  # without seconds

    return build


def changed(cfg, path, value):
    """The config with another value; `cfg` stays."""
    cfg = cfg.copy()
    with open_dict(cfg):
        OmegaConf.update(cfg, path, value, merge=False)
    return cfg


def steers(path):
    """Whether the program itself reads a key before it builds anything: it is changed alone."""
    alone = path.count(".") == 0 or path.count(".") == 1 and path.startswith(("callbacks.", "logger."))
    refused = path.startswith("explainers.") and path.endswith(".target")
    return alone or refused or path.startswith("results.")


effective = set()
"""(Program, key, value) of what steers a program and has an effect: it has it in all configs, and all explainers."""


def steering(program, path, cfg):
    """Under which name `effective` has a key of a config; None for one that does not steer."""
    if not steers(path):
        return None
    return program, re.sub(r"^explainers\.\w+\.target$", "explainers.*.target", path), str(OmegaConf.select(cfg, path))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_of_a_config_has_an_effect(name, build, tmp_path):
    program, *overrides = CONFIGS[name]
    cfg = composed(*overrides, folder=tmp_path, config=program)
    for missing in OmegaConf.missing_keys(cfg):
        OmegaConf.update(cfg, missing, "given")
    keys = dict(leaves(cfg))
    silent = set(keys)
    for interpolated in (False, True):  # all at once, each with a nonsense of its own that is looked for
        marked = {key: f"nonsense<{key}>" for key, own in keys.items() if own == interpolated and not steers(key)}
        other = cfg.copy()
        for key, value in marked.items():
            with open_dict(other):
                OmegaConf.update(other, key, value, merge=False)
        text = build(program, other, checks=False)
        silent -= {key for key, value in marked.items() if value in text}
    before = build(program, cfg)
    for key in sorted(silent):
        own = steering(program, key, cfg)
        if own in effective or build(program, changed(cfg, key, f"nonsense<{key}>")) != before:
            silent.discard(key)
            effective.update({own} - {None})
    print(f"{name}: {len(keys)} keys, without effect: {', '.join(sorted(silent)) or 'none'}")
    unexplained = {key for key in silent if key not in EXCEPTIONS.get(name, {}) and key not in SHARED}
    assert unexplained == set()
