"""Every file in configs: it composes, and what it describes can be built."""

import inspect
import json
import math
import re
from itertools import zip_longest

import pytest
import timm
import torch
from commands import (
    NO_PICTURES,
    QUIET,
    ROOT,
    SMALL_DIGITS,
    SMALL_PAPER_NETWORK,
    composed,
    csv_rows,
    draw_images,
    train,
)
from hydra.utils import get_object, instantiate
from lightning import seed_everything
from omegaconf import OmegaConf
from safetensors.torch import save_file

from explainers.running.settings import check_arguments, check_keys
from explainers.running.targets import named_options
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.projections import simplex
from explainers.vectors.self_explaining import SelfExplaining

FOLDER = ROOT / "configs/experiment"
PATHS = sorted(FOLDER.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
EXPERIMENTS = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in PATHS]
EVALUATIONS = [name for name in EXPERIMENTS if "# Command: python eval.py" in (FOLDER / f"{name}.yaml").read_text()]
TRAININGS = [name for name in EXPERIMENTS if name not in EVALUATIONS]
STEPS = (
    *("surrogate", "full_finetuning", "vit_shapley", "tve_vitb", "studies/vector", "self_explaining"),
    *("demo/head", "demo/anyhead", "demo/tve", "demo/vector", "demo/source"),
)
"""Trainings that differ in their module, network, loss or kind of images: each of these is in one of them."""
IMAGE_FOLDERS = (
    "train",
    "val",
    "imagenet_samples",
    "caltech",
    "small",
    *(f"{name}/{split}" for name in ("imagenette", "cats_vs_dogs") for split in ("train", "val")),
)
EXPLAINERS = sorted(
    path.stem for path in (ROOT / "configs/explainers").glob("*.yaml") if not path.stem.endswith("_common")
)
SELF_EXPLAINING = ("explainability_vector", "self_explainer", "self_explaining")  # they need what a training leaves


def options_of(group):
    """The names of a group: those of its files, and those in configs/names."""
    named = named_options(group).keys() if (ROOT / f"configs/names/{group}.yaml").exists() else set()
    return {path.stem for path in (ROOT / f"configs/{group}").glob("*.yaml")} | named


GROUPS = ("cache", "callbacks", "data", "logger", "module", "target", "trainer")
OPTIONS = {group: sorted(f"{group}={name}" for name in options_of(group)) for group in (*GROUPS, "debug")}
OPTIONS["target"].remove("target=timm")  # the base of the others, without a model
OPTIONS["explainers"] = [f"explainers@explainer={name}" for name in EXPLAINERS]
NO_MODEL = ("grid.image_size=64", "grid.patch_size=8", "blocks=[0]", "direct=[]")  # is built, from which they follow
ROWS = [tuple(filter(None, row)) for row in zip_longest(*(OPTIONS[group] for group in (*GROUPS, "explainers")))]


SMALL_EXPLAINERS = {
    "kernel_shap": ("explainers.kernel_shap.budget=20",),
    "oracle": ("explainers.oracle.cache_dir=null",),
    "tve_paper": tuple(f"explainers.tve_paper.{setting.removeprefix('explainer.')}" for setting in SMALL_PAPER_NETWORK),
}


def write_texts(folder, classes):
    """Embeddings of a text for each class, in the files that explainers of texts read."""
    texts = [f"a photo of a {number}" for number in range(classes)]
    folder.mkdir()
    (folder / "prompts.json").write_text(json.dumps({"imagenet": texts, "prompts": texts}))
    save_file({"embeddings": torch.randn(classes, 6)}, folder / "embeddings.safetensors")


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
def test_every_experiment_composes_resolves_and_is_named_after_its_file(tmp_path):
    """Whatever a training is made of takes a step, see below; of all others the keys are those of what is called."""
    stepping = set().union(*(parts(composed(f"experiment={name}", folder=tmp_path)) for name in STEPS))
    for experiment in EXPERIMENTS:
        cfg = composed(f"experiment={experiment}", folder=tmp_path, config=program(experiment))
        resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        check_arguments(cfg)
        check_calls(resolved)
        by_rule = "${" in OmegaConf.to_container(cfg, resolve=False)["name"]  # of its target, data or task
        assert cfg.name == experiment.replace("/", "_") or by_rule
        assert experiment in EVALUATIONS or parts(cfg) <= stepping


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
    overrides = [f"experiment={experiment}", "debug=fast", "target=tiny", f"cache_dir={tmp_path / 'cache'}", *QUIET]
    cfg = composed(f"experiment={experiment}", folder=tmp_path)
    if "ffcv" in cfg.data._target_:
        overrides += ["data=digits"]
    if "DigitImages" in cfg.data._target_ or "data=digits" in overrides:
        overrides += SMALL_DIGITS
    else:
        overrides += [f"data_dir={data_dir}", "data.batch_size=4", "data.num_workers=0"]
    if OmegaConf.select(cfg, "data.train.roots", default=()) is None:  # one's own folder
        overrides += [f"data.root={data_dir}"]
    explainer, module = cfg.get("explainer") or {}, cfg.module
    if "PaperNetwork" in str(explainer):
        overrides += SMALL_PAPER_NETWORK
    if explainer.get("weights"):  # what other experiments leave
        overrides += ["explainer.weights=null", "target.model.checkpoint_path=''"]
    if OmegaConf.select(cfg, "module.head.projection"):
        overrides += ["projection@module.head.projection=simplex"]  # few images are not of all classes
    if "selection" in module:
        overrides += ["module.selection.k=2"]
    if module.get("last_blocks"):
        overrides += ["module.last_blocks=1"]
    if OmegaConf.select(cfg, "explainer.network.direct"):  # of the blocks of a larger target
        overrides += ["explainer.network.direct=[]"]
    if OmegaConf.select(cfg, "data.train.exclude"):
        overrides += ["data.train.exclude=[]"]
    roles = {"teacher": "{}", "onto": "{}", "vector.predicting": "[{}]", "vector.explaining": "[{}]"}
    own = {role: form for role, form in roles.items() if OmegaConf.select(cfg, f"module.{role}") is not None}
    files = {role: self_explaining_file(role, *overrides, folder=tmp_path) for role in own}
    given = (f"module.{role}={own[role].format(path)}" for role, path in files.items())
    loss = train(*overrides, *given, folder=tmp_path / "run")
    assert math.isfinite(loss) and not no_sockets
    assert not any((tmp_path / "run").glob("**/*.*"))


def self_explaining_file(role, *overrides, folder):
    """What a self-explaining model of the target that `overrides` name leaves, untrained."""
    alpha = 0.5 if role == "vector.explaining" else 1
    cfg = composed(*overrides, folder=folder)
    seed_everything(0)
    target = instantiate(cfg.target)
    target.head = FixedHead(simplex(10, target.embed_dim))
    (folder / f"alpha_{alpha}").mkdir(exist_ok=True)
    return SelfExplaining(target, instantiate(cfg.grid)).export(folder / f"alpha_{alpha}", alpha)


@pytest.mark.slow
def test_the_papers_network_has_its_own_size_with_nothing_downloaded(tmp_path, monkeypatch):
    """In shapes alone, forward and backward: there are 200 million weights. A smaller one trains, see above."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    cfg = composed("experiment=tve_vitb", "target=tiny", "explainer.network.mae=null", folder=tmp_path)
    with torch.device("meta"):
        target, grid = instantiate(cfg.target), instantiate(cfg.grid)
        network = instantiate(cfg.explainer.network)(target, grid)
        predicted = network(torch.zeros(2, 3, 64, 64, dtype=torch.uint8))
    assert predicted.shape == (2, 64, 2, 48)
    predicted.sum().backward()
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    assert all(weight.grad.shape == weight.shape for weight in weights)
    assert sum(weight.numel() for weight in weights) > 2e8


@pytest.mark.slow
def test_every_option_of_every_group_composes(tmp_path):
    """One option of each group at a time: they change nothing in one another, but `debug` does."""
    for row in (*ROWS, *zip(OPTIONS["debug"])):
        resolved = OmegaConf.to_container(composed(*row, *NO_MODEL, folder=tmp_path), resolve=True)
        assert timm.is_model(resolved["target"]["model"]["model_name"].partition(".")[0]), row
        for group, _, option in (override.rpartition("@")[2].partition("=") for override in row):
            if group not in ("debug", "callbacks", "logger") and option != "none":
                assert "_target_" in resolved[group], row


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*EXPLAINERS} - {*SELF_EXPLAINING}))
def test_every_explainer_that_an_evaluation_can_name_is_built_from_a_target_and_explains(name, tmp_path):
    write_texts(tmp_path / "text", classes=10)
    own = f"explainers=[{name}]", f"data_dir={tmp_path}", *SMALL_EXPLAINERS.get(name, ())
    cfg = composed("target=tiny", *own, folder=tmp_path, config="eval")
    explainer = instantiate(cfg.explainers[name], target=instantiate(cfg.target)).eval()
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        assert explainer(images, torch.tensor([0, 1])).shape == (2, 8, 8)


@pytest.mark.slow
def test_every_task_that_an_evaluation_can_name_says_its_data_and_its_target(tmp_path):
    names = sorted(options_of("data") - {"torchvision", "unlabelled"})
    own = ("target.head=shared", "tasks.cifar10.target.head=own")
    for given, head, heads in ((), None, {}), (own, "shared", {"cifar10": "own"}):
        cfg = composed(f"tasks=[{','.join(names)}]", *given, folder=tmp_path, config="eval")
        assert {name: task.target.head for name, task in cfg.tasks.items()} == dict.fromkeys(names, head) | heads
    assert all(task.target.keys() == {"head"} for task in cfg.tasks.values())
    tasks = OmegaConf.to_container(cfg.tasks, resolve=True)
    for name in names:
        own = composed(f"data={name}", folder=tmp_path).data
        assert tasks[name]["data"] == OmegaConf.to_container(own, resolve=True)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "file"), [("cifar100", "names/data.yaml"), ("mura", "data/mura.yaml")])
def test_the_commands_of_a_task_compose_with_its_data_and_a_head_for_them(task, file, tmp_path):
    """One trains a head, another one measures with it; MURA has also a model of a single logit."""
    text = (ROOT / "configs" / file).read_text()
    commands = re.findall(r"^#   python (train|eval)\.py (.*)$", text, re.MULTILINE)
    train_of, *evals = [composed(*line.split(), folder=tmp_path, config=script) for script, line in commands]
    for cfg in evals:
        target = OmegaConf.merge(cfg.target, cfg.tasks[task].target)
        fitted, single = f"runs/{train_of.name}/head.safetensors", target.model.get("num_classes")
        assert (target.head, single) in ((fitted, None), (None, 1))
        assert cfg.tasks[task].data._target_ == train_of.data._target_
        assert target.model.model_name == train_of.target.model.model_name


@pytest.mark.slow
def test_every_projection_and_every_option_of_the_metrics_composes(tmp_path):
    for name in named_options("projection"):
        overrides = ("experiment=self_explaining", f"projection@module.head.projection={name}")
        assert callable(instantiate(composed(*overrides, folder=tmp_path).module.head.projection))
    for name in options_of("metrics"):
        cfg = composed("experiment=demo/eval", f"metrics={name}", folder=tmp_path, config="eval")
        assert "_target_" in OmegaConf.to_container(cfg.evaluation, resolve=True)


@pytest.mark.parametrize("node", ["explainer.network", "trainer", "callbacks.best"])
def test_a_misspelt_key_in_a_file_fails_and_is_named(node, tmp_path):
    tiny = ("experiment=demo/tve", "target=tiny", "data=digits", "logger=csv", *SMALL_DIGITS, *QUIET)
    with pytest.raises(SystemExit, match="(?s)^error: .*misspelt"):
        train(*tiny, f"+{node}.misspelt=1", folder=tmp_path)


def test_a_name_without_the_group_of_its_file_is_refused_with_the_override_that_works(tmp_path):
    with pytest.raises(SystemExit, match="^error: expected teacher@module.loss=propagation, .* got module.loss="):
        train("experiment=demo/anyhead", "module.loss=propagation", folder=tmp_path)


def test_an_override_may_interpolate_relatively(tmp_path):
    cfg = composed("experiment=demo/tve", "module.optimizer.lr=${.weight_decay}", folder=tmp_path)
    check_keys(cfg, ROOT / "configs/train.yaml")
    assert cfg.module.optimizer.lr == cfg.module.optimizer.weight_decay


@pytest.mark.slow
def test_debug_overfit_lowers_the_loss_of_its_two_batches(tmp_path):
    tiny = ("experiment=demo/tve", "target=tiny", "data=digits", "logger=csv", *SMALL_DIGITS, *QUIET)
    folder = tmp_path / "run"
    train(*tiny, NO_PICTURES, "debug=overfit", "trainer.max_epochs=12", "trainer.log_every_n_steps=1", folder=folder)
    rows = csv_rows(folder / "csv/version_0/metrics.csv")
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert len(losses) == 24
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
