"""The last line of a training names a command that uses what was trained."""

import shlex
from pathlib import Path

from commands import composed

from explainers.app.command import parser
from train import next_command


def after(*overrides, folder, run="runs/x=1", target="vit_tiny"):
    return next_command(composed(*overrides, folder=folder), target, Path(run))


EXPLAIN, LOAD = "explainers explain my/photo.jpg ", 'explainers.load("runs/x=1") in Python'
VIT_TINY = f"{EXPLAIN}--model vit_tiny_patch16_224.augreg_in21k_ft_in1k "
COMMANDS = {
    "experiment=tve_vitb": f"{EXPLAIN}--explainer runs/x=1",
    "experiment=demo/tve": (
        f"{EXPLAIN}--explainer runs/x=1 --model test_resnet --weights runs/demo_target/target.safetensors"
    ),
    "experiment=linear_head target=vit_tiny": f"{VIT_TINY}--head runs/x=1/head.safetensors",
    "experiment=linear_head target=vit_tiny 'target.model.checkpoint_path=a b.pth'": (
        f"{VIT_TINY}--weights 'a b.pth' --head runs/x=1/head.safetensors"
    ),
    "experiment=full_finetuning target=vit_base": (
        f"{EXPLAIN}--model vit_base_patch16_224.orig_in21k_ft_in1k --weights runs/x=1/target.safetensors"
    ),
    "experiment=linear_head ++target.model.img_size=112": "the model is in runs/x=1",
    "experiment=self_explaining": LOAD,
    "experiment=anyhead module.loss.functionals=images": LOAD,
}


def test_after_a_training_there_is_a_command_that_uses_its_result(tmp_path):
    for overrides, command in COMMANDS.items():
        assert after(*shlex.split(overrides), folder=tmp_path) == command
        if command.startswith("explainers "):
            parser().parse_args(shlex.split(command)[1:])


def test_after_a_surrogate_a_command_trains_an_explainer_of_it(tmp_path):
    _, program, *words = shlex.split(after("experiment=surrogate", folder=tmp_path))
    got = composed(*words, folder=tmp_path)
    assert program == "train.py" and got.explainer.surrogate == "runs/x=1/target.safetensors"
