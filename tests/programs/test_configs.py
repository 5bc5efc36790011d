"""Every file in configs: it composes, and what it describes can be built."""

import inspect
import json
import math
import re
from itertools import groupby, zip_longest

import pytest
import timm
import torch
from commands import QUIET, ROOT, SMALL_DIGITS, SMALL_PAPER_NETWORK, composed, draw_images, train
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf
from safetensors.torch import save_file

from explainers.running.settings import check_arguments, check_keys
from explainers.running.targets import named_options

FOLDER = ROOT / "configs/experiment"
PATHS = sorted(FOLDER.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
EXPERIMENTS = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in PATHS]
EVALUATIONS = [name for name in EXPERIMENTS if "# Command: python eval.py" in (FOLDER / f"{name}.yaml").read_text()]
IMAGES = ("data.batch_size=4", "data.num_workers=0")
STEPS = {
    "surrogate": IMAGES,
    "full_finetuning": IMAGES,
    "vit_shapley": IMAGES,
    "tve_vitb": ("data=digits", *SMALL_DIGITS, *SMALL_PAPER_NETWORK),
    "self_explaining": (*IMAGES, "projection@module.head.projection=simplex", "module.teacher=base"),
}
"""Trainings that differ in their module, network, loss or kind of images, with what makes them small."""
ELSEWHERE = ("studies/vector", "demo/head", "demo/anyhead", "demo/tve", "demo/vector", "demo/source")
"""Those that take steps in test_demo.py and test_vector_commands.py, or differ from these in their target alone."""
IMAGE_FOLDERS = [f"{name}{split}" for name in ("", "imagenette/", "cats_vs_dogs/") for split in ("train", "val")]
IMAGE_FOLDERS += ["imagenet_samples", "caltech", "small"]
EXPLAINERS = {path.stem for path in (ROOT / "configs/explainers").glob("*.yaml") if not path.stem.endswith("_common")}
SELF_EXPLAINING = {"explainability_vector", "self_explainer", "self_explaining"}  # they need what a training leaves


def options_of(group):
    """The names of a group: those of its files, and those in configs/names."""
    named = named_options(group).keys() if (ROOT / f"configs/names/{group}.yaml").exists() else set()
    return {path.stem for path in (ROOT / f"configs/{group}").glob("*.yaml")} | named


def program(experiment):
    return "eval" if experiment in EVALUATIONS else "train"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name in IMAGE_FOLDERS:
        draw_images(root / name)
    return root


def parts(cfg):
    """What a step of this training runs."""
    keys = ("module._target_", "explainer._target_", "explainer.network._target_", "module.loss._target_")
    found = {OmegaConf.select(cfg, key) for key in (*keys, "data._target_")}
    return {name for name in found if "ffcv" not in str(name)}  # which digits stand for


def check_calls(settings):
    """What is called with these settings has arguments of their names."""
    for value in settings.values() if isinstance(settings, dict) else settings:
        if isinstance(value, (dict, list)):
            check_calls(value)
    if "_target_" in settings and isinstance(settings, dict):
        given = {key: value for key, value in settings.items() if key not in ("_target_", "_partial_", "_convert_")}
        inspect.signature(get_object(settings["_target_"])).bind_partial(**given)


@pytest.mark.slow
def test_every_experiment_composes_and_is_named_after_its_file_and_so_do_options_that_none_uses(tmp_path):
    """Whatever a training is made of takes a step, see below; of all others the keys are those of what is called."""
    unused = {f"{group}={name}" for group in ("module", "target", "trainer", "debug") for name in options_of(group)}
    stepping = set().union(*(parts(composed(f"experiment={name}", folder=tmp_path)) for name in (*STEPS, *ELSEWHERE)))
    for experiment in EXPERIMENTS:
        cfg = composed(f"experiment={experiment}", folder=tmp_path, config=program(experiment))
        resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        check_arguments(cfg)
        check_calls(resolved)
        by_rule = "${" in OmegaConf.to_container(cfg, resolve=False)["name"]  # of its target, data or task
        assert cfg.name == experiment.replace("/", "_") or by_rule
        assert experiment in EVALUATIONS or parts(cfg) <= stepping
        unused -= {f"{group}={name}" for group, name in HydraConfig.get().runtime.choices.items()}
    assert all(timm.is_model(model.partition(".")[0]) for model in named_options("target").values())
    unused -= {f"target={name}" for name in ("timm", *named_options("target"))}  # all of which are one config
    for row in zip_longest(*(sorted(each) for _, each in groupby(sorted(unused), lambda name: name.partition("=")[0]))):
        resolved = OmegaConf.to_container(composed(*filter(None, row), folder=tmp_path), resolve=True)
        check_calls(resolved["target"]), check_calls(resolved["module"]), get_object(resolved["trainer"]["_target_"])


def test_an_experiment_is_a_laboratory_record():
    """Its head says what it reproduces, its command, hardware and time, what to expect, and the differences."""
    for experiment in EXPERIMENTS:
        head = (ROOT / f"configs/experiment/{experiment}.yaml").read_text().split("defaults:")[0]
        command = rf"Command: python {program(experiment)}.py (-m )?experiment={experiment}\b"
        for part in (command, r"Reproduces: \S", r"Hardware: .*\. Time: \S", r"Expect: \S", r"Differs: \S"):
            assert re.search(f"^# {part}", head, re.MULTILINE), (experiment, part)
        assert not re.search(r"TIME_|EXPECT_", head), experiment


@pytest.mark.slow
@pytest.mark.parametrize("experiment", STEPS)
def test_every_kind_of_training_takes_a_step_on_a_tiny_target(experiment, tmp_path, data_dir, no_sockets):
    small = ("debug=fast", "target=tiny", f"data_dir={data_dir}", f"cache_dir={tmp_path / 'cache'}", *QUIET)
    loss = train(f"experiment={experiment}", *small, *STEPS[experiment], folder=tmp_path / "run")
    assert math.isfinite(loss) and not no_sockets
    assert not any((tmp_path / "run").glob("**/*.*"))


@pytest.mark.slow
def test_every_explainer_that_an_evaluation_can_name_is_built_from_a_target_and_explains(tmp_path):
    names, texts = sorted(EXPLAINERS - SELF_EXPLAINING), [f"a photo of a {number}" for number in range(10)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text/prompts.json").write_text(json.dumps({"imagenet": texts, "prompts": texts}))
    save_file({"embeddings": torch.randn(10, 6)}, tmp_path / "text/embeddings.safetensors")
    small = [f"explainers.tve_paper.{setting.removeprefix('explainer.')}" for setting in SMALL_PAPER_NETWORK]
    small += ["explainers.kernel_shap.budget=20", "explainers.oracle.cache_dir=null", f"data_dir={tmp_path}"]
    cfg = composed("target=tiny", f"explainers=[{','.join(names)}]", *small, folder=tmp_path, config="eval")
    target, images = instantiate(cfg.target), torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    for name in names:
        explainer = instantiate(cfg.explainers[name], target=target).eval()
        with torch.no_grad():
            assert explainer(images, torch.tensor([0, 1])).shape == (2, 8, 8), name


@pytest.mark.slow
def test_every_task_that_an_evaluation_can_name_says_its_data_and_its_target(tmp_path):
    names = sorted(options_of("data") - {"torchvision", "unlabelled"})
    own = ("target.head=shared", "tasks.cifar10.target.head=own")
    for given, head, heads in ((), None, {}), (own, "shared", {"cifar10": "own"}):
        cfg = composed(f"tasks=[{','.join(names)}]", *given, folder=tmp_path, config="eval")
        assert {name: task.target.head for name, task in cfg.tasks.items()} == dict.fromkeys(names, head) | heads
    tasks = OmegaConf.to_container(cfg.tasks, resolve=True)
    for task in tasks.values():
        assert "_target_" in task["data"] and task["target"].keys() == {"head"}
        check_calls(task["data"])
    own = composed("data=mura", folder=tmp_path).data
    assert tasks["mura"]["data"] == OmegaConf.to_container(own, resolve=True)


@pytest.mark.slow
def test_every_projection_and_every_option_of_the_metrics_composes(tmp_path):
    for settings in named_options("projection").values():
        check_calls(settings)
    for name in options_of("metrics"):
        cfg = composed("experiment=demo/eval", f"metrics={name}", folder=tmp_path, config="eval")
        assert "_target_" in OmegaConf.to_container(cfg.evaluation, resolve=True)


def test_an_override_may_interpolate_relatively(tmp_path):
    cfg = composed("experiment=demo/tve", "module.optimizer.lr=${.weight_decay}", folder=tmp_path)
    check_keys(cfg, ROOT / "configs/train.yaml")
    assert cfg.module.optimizer.lr == cfg.module.optimizer.weight_decay


@pytest.mark.parametrize("program", ["train", "eval"])
def test_a_program_or_another_key_reads_every_key_at_the_top(program, tmp_path):
    """Deeper keys are arguments of a `_target_`, which refuses unknown ones when an experiment takes its step."""
    readers = [
        path for name in (f"{program}.py", "explainers/running/*.py", "configs/**/*.yaml") for path in ROOT.glob(name)
    ]
    text = "\n".join(path.read_text() for path in readers)
    read = set(re.findall(r"""(?:\bcfg\.(?:(?:get|pop)\(")?|\$\{(?:[\w.]+:)?)(\w+)""", text))
    assert set(composed(folder=tmp_path, config=program)) <= read
