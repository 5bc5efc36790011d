"""The last line of a training names a command that composes, and that builds what was trained."""

import shlex
from pathlib import Path

import pytest
from commands import DIGITS, ROOT, TINY_RUN, composed, train
from composing import remembering
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from explainers.running.next_command import Training, next_command
from explainers.running.weights import use_weights
from explainers.saved.weights import read_header
from explainers.share.catalogue import Catalogue, available

FOLDER = Path("runs/x=1")  # of a sweep's job


def following(*overrides, folder, classes=10, target=None):
    """The config of a training of a target, the program that follows, and its config."""
    cfg = composed(*overrides, folder=folder)
    use_weights(cfg)
    choices = HydraConfig.get().runtime.choices
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"), remembering():
        command = next_command(Training(cfg, choices, FOLDER, [str(name) for name in range(classes)], target))
    python, program, *words = shlex.split(command)
    assert python == "python"
    got = composed(*words, folder=folder, config=program.removesuffix(".py"))
    use_weights(got)
    assert got.name.startswith(f"{FOLDER.name}_")  # each job has its own
    return cfg, program, got


def same(wanted, got, *without):
    wanted, got = (OmegaConf.to_container(node, resolve=True) for node in (wanted, got))
    return all(got[name] == value for name, value in wanted.items() if name not in without)


VIT = "--model vit_tiny_patch16_224.augreg_in21k_ft_in1k --weights"


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        (("experiment=anyhead", "data.root=my/images"), ""),
        (("experiment=tve_vitb", "explainer.network.mae=mae.pth"), ""),
        (("experiment=anyhead", "data.root=my/images", "target.model.checkpoint_path=a.pth"), f" {VIT} a.pth"),
        (
            ("experiment=vit_shapley", "explainer.surrogate=runs/s/target.safetensors"),
            f" {VIT} runs/s/target.safetensors",
        ),
    ],
)
def test_after_an_explainer_a_command_explains_a_photo(overrides, model, tmp_path):
    """Weights of a model that are not timm's are named."""
    cfg = composed(*overrides, folder=tmp_path)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"), remembering():
        run = Training(cfg, HydraConfig.get().runtime.choices, Path("runs/anyhead_images"), ())
        assert next_command(run) == "explainers explain my/photo.jpg --explainer runs/anyhead_images" + model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (("experiment=quickstart_tve",), "tve"),
        (("experiment=quickstart_anyhead", "direct=[]", "explainer.network.depth=2"), "anyhead"),
        (
            ("data=digits", "target=digits", "explainers@explainer=shapley_light", "explainer.network.width=24"),
            "shapley_light",
        ),
    ],
)
def test_after_an_explainer_of_a_task_a_command_measures_the_same_network(overrides, name, tmp_path):
    cfg, program, got = following(*overrides, folder=tmp_path)
    found = got.explainers[name]
    assert program == "eval.py" and found.weights == "runs/x=1/explainer.safetensors"
    assert all(found.get(key) == cfg.explainer.get(key) for key in ("_target_", "hops", "surrogate", "temperature"))
    assert same(cfg.explainer.network, found.network, "mae", "pretrained")
    assert same(cfg.target, got.target) and same(cfg.grid, got.grid)
    assert same(cfg.data, got.tasks.digits.data, "batch_size", "size")


def test_after_a_head_a_command_measures_with_it_on_the_task(tmp_path, target):
    (weights_file := tmp_path / "vit.safetensors").touch()
    given = ("target=vit_tiny", f"weights={weights_file}", "data=folder", "data.root=/my/images", "data_dir=/d")
    cfg, program, got = following("experiment=linear_head", *given, folder=tmp_path, target=target)
    assert program == "eval.py" and got.target.head == got.tasks.folder.target.head == "runs/x=1/head.safetensors"
    assert (got.tasks.folder.data.root, got.data_dir) == ("/my/images", "/d")
    assert same(cfg.target, got.target, "head") and list(got.methods) == ["DecompX-SkipPLUS"]
    _, _, got = following("experiment=quickstart_head", "data.task=odd", folder=tmp_path, classes=2, target=target)
    assert got.tasks.digits.data.task == "odd"


def test_after_a_head_on_a_backbone_with_an_anyhead_a_command_measures_the_anyhead(tmp_path, target, monkeypatch):
    (known,) = [each for each in available() if each.explainer == "anyhead"]
    monkeypatch.setattr("explainers.running.next_command.for_target", lambda found: Catalogue([known]))
    given = ("experiment=linear_head", "target=vit_tiny", "data=imagenette")
    _, program, got = following(*given, folder=tmp_path, target=target)
    assert program == "eval.py" and got.target.head == "runs/x=1/head.safetensors" and not got.methods
    network = read_header(known.folder / "explainer.safetensors")["network"]
    found = got.explainers.anyhead
    assert Path(found.weights).samefile(known.folder / "explainer.safetensors")
    assert all(found.network[key] == value for key, value in network.items() if key != "class")
    assert (found.temperature, found.blend) == (2.0, 0.5)
    _, _, got = following(*given, "grid.patch_size=32", folder=tmp_path, target=target)
    assert list(got.methods) == ["DecompX-SkipPLUS"]  # it has the vectors of other patches


def test_after_a_target_a_command_explains_it(tmp_path, monkeypatch, make_target):
    monkeypatch.chdir(tmp_path)
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "target.safetensors").touch()
    cfg, program, got = following(
        "experiment=full_finetuning", "target=vit_base", folder=tmp_path, classes=7, target=make_target("test_resnet")
    )
    model = {"pretrained": False, "num_classes": 7, "checkpoint_path": "runs/x=1/target.safetensors"}
    assert program == "eval.py" and list(got.tasks) == ["imagenette"] and list(got.methods) == ["GradCAM"]
    assert OmegaConf.to_container(got.target.model) == OmegaConf.to_container(cfg.target.model) | model


def test_after_a_surrogate_a_command_trains_an_explainer_of_it(tmp_path):
    own = ("data.train.roots=[/a,/b]", "target.model.pretrained=false")
    cfg, program, got = following("experiment=surrogate", *own, folder=tmp_path)
    assert program == "train.py" and got.explainer._target_ == "explainers.shapley.Shapley"
    assert got.explainer.surrogate == "runs/x=1/target.safetensors"
    assert list(got.data.train.roots) == ["/a", "/b"] and same(cfg.target, got.target)


@pytest.mark.parametrize(
    ("overrides", "explains", "task"),
    [
        (("experiment=self_explaining",), True, "imagenette"),
        (("experiment=self_explaining", "module.alpha=1", "module.teacher=null"), False, "imagenette"),
        (("experiment=vector_vit_tiny_source",), True, "photos"),
        (("experiment=quickstart_vector", "data.domain=small"), True, "digits"),
        (("experiment=explainability_vector",), True, "cats_vs_dogs"),
    ],
)
def test_after_a_model_that_explains_itself_a_command_measures_it(overrides, explains, task, tmp_path, target):
    cfg, program, got = following(*overrides, folder=tmp_path, target=target)
    assert program == "eval.py" and list(got.tasks) == [task] and same(cfg.grid, got.grid)
    assert got.target._target_ == "explainers.vectors.exported_target"
    assert got.target.head == "runs/x=1/model.safetensors" and same(cfg.target.model, got.target.model)
    if explains:
        assert got.explainers.self_explainer.weights == got.target.head
    else:
        assert list(got.methods) == ["DecompX-SkipPLUS"]


@pytest.mark.slow
def test_without_such_a_command_there_is_what_loads_the_explainer(tmp_path, capsys):
    """With configs of the user's own, or in a program that Hydra did not start, as here."""
    train(*TINY_RUN, *DIGITS, "cache=none", "trainer.max_epochs=1", folder=tmp_path / "run")
    assert capsys.readouterr().out.splitlines()[-1] == f'next: explainers.load("{tmp_path / "run"}") in Python'
    train(*TINY_RUN, *DIGITS, "cache=none", "trainer.max_epochs=1", "next=false", folder=tmp_path / "run")
    assert "next:" not in capsys.readouterr().out
