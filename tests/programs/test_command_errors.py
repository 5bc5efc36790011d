"""A mistake in a command ends in one line that names what was meant."""

import subprocess
import sys

import pytest
from commands import DIGITS, ROOT, evaluate, train
from hydra import compose, initialize_config_dir
from test_configs import EXPERIMENTS, program
from test_errors import DIGITS_EVALUATION, error

from explainers.errors import InputError
from explainers.running import program as programs

TRAINING = ("target=tiny", *DIGITS, "explainers@explainer=tve", "logger=csv", "callbacks=train")
COMMANDS = {
    ("train", "trainer.max_epoch=3"): "no setting trainer.max_epoch: did you mean trainer.max_epochs?",
    ("train", "Experiment=tve_vitb"): "no setting Experiment: did you mean experiment?",
    ("train", "explainer.lr=1"): "no setting explainer.lr: did you mean module.optimizer.lr?",
    ("train", "evaluation.levels=3"): "no setting evaluation: ",
    ("eval", "explainer=tve"): "no group explainers@explainer in the config of this program: did you mean explainers?",
    ("train", "data=digitz"): "no data named digitz: did you mean digits?",
    ("train", "target=vit_smal_patch16_224"): "no target named vit_smal_patch16_224: did you mean vit_small_patch16_",
    ("train", "target=qqqq"): "no target named qqqq: there are clip_vit_b16, ",
    ("train", "experiment=tve_vitg"): "no experiment named tve_vitg: did you mean tve_vitb",
    ("eval", "experiment=skipplus"): "no experiment named skipplus: did you mean papers/skipplus",
    ("train", "hydra/launcher=slurmm"): "no hydra/launcher named slurmm: did you mean slurm?",
    ("train", "explainers=[chance]"): "in the config of this program: did you mean explainers@explainer?",
    ("train", "experiment=explain"): "one of eval.py: run python eval.py experiment=explain",
    ("train", "callbacks=null"): "got null: leave a group out with ~, as in ~callbacks",
    ("train", "trainer.max_epochs"): "cannot read 'trainer.max_epochs': ",
    ("eval", "classes=label"): "no setting classes: did you mean pictures.classes, evaluation.classes?",
    ("eval", "explainers.tve.weights=file"): "no setting explainers.tve: add tve to explainers=[...], which has chance",
    ("eval", "trainer.max_epochs=3"): "no setting trainer.max_epochs in the config of this program: train.py has it",
    ("train", "weights=epoch=3.pth"): """: quote the value, as in 'weights="epoch=3.pth"'""",
    ("train", "data.root=my, 2"): "Ambiguous value for argument 'data.root=my, 2' 1. To use it as a list",
    ("eval", "tasks=[imagenete]"): "no tasks named imagenete: did you mean imagenet",
}


@pytest.mark.situation(21)
@pytest.mark.parametrize(("name", "override"), COMMANDS, ids=str)
def test_a_command_that_cannot_be_composed_says_what_was_meant_in_one_line(name, override, monkeypatch):
    def main():
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            compose(name, sys.argv[1:])

    monkeypatch.setattr(sys, "argv", [f"/somewhere/{name}.py", "target=tiny", override])
    monkeypatch.delenv(programs.TRACEBACK, raising=False)
    with monkeypatch.context() as own, pytest.raises(SystemExit) as ending:
        own.setenv(programs.COMPOSING, "")  # restored afterwards
        own.setenv(programs.TRACEBACK, "")
        programs.start(main, ROOT / "configs")
    line = ending.value.code
    assert line.startswith("error: ") and "\n" not in line and COMMANDS[name, override] in line


RUNS = {
    ("train", "trainer.max_epochs=three"): "expected trainer.max_epochs of type Optional[int], got 'three'",
    ("train", "explainer.hops=1"): "expected explainer.hops of type list[int], got 1",
    ("train", "trainer.devices=0"): "expected trainer.devices above 0, a list of devices, -1 or auto, got 0",
    ("train", "trainer.precision=bf16-true"): "32-true, bf16-mixed or 16-mixed, got bf16-true",
    ("train", "seed=-1"): "expected seed from 0 to ",
    ("train", "title=${nothing}"): "Interpolation key 'nothing' not found",
    ("train", "target=timm"): "expected a model of timm: name it, as in target=vit_small_patch16_224",
    (
        "train",
        "target=vit_so400m_patch14_siglip_384",
    ): "got images of 384 × 384: take ++target.model.img_size=[378,378]",
    ("train", "++target.model.widht=1"): "got an unexpected keyword argument 'widht'",
    ("train", "data.size.val=1 trainer.devices=2"): "expected one val image or more for each of 2 processes, got 1",
    ("eval", "evaluation.classes=predictd"): "expected classes predicted or label, got predictd",
    ("eval", "evaluation.reference=orakel"): "expected reference to be one of the explainers chance",
    ("eval", "+tasks.digits.dat.batch_size=1"): "no setting tasks.digits.dat: nothing reads it; did you mean data?",
    ("eval", "explainers=[] methods=[]"): "nothing to measure: name explainers, such as ",
    ("eval", "methods=GradCAM"): "expected methods as a list of names, such as methods=[GAE], or ",
    ("eval", "pictures=null overlays=true"): "expected pictures, which overlays=true draws",
    ("eval", "reference=paper reference.target=ViT-Huge"): "expected a target that the paper has values of",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overrides"), RUNS, ids=str)
def test_a_command_with_a_value_that_cannot_be_says_what_was_expected_in_one_line(name, overrides, tmp_path):
    run, command = (train, TRAINING) if name == "train" else (evaluate, DIGITS_EVALUATION)
    assert RUNS[name, overrides] in error(run, *command, *overrides.split(), folder=tmp_path)


@pytest.mark.parametrize("name", ["train", "eval"])
def test_help_lists_the_experiments_of_the_program_alone(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    monkeypatch.delenv(programs.TRACEBACK, raising=False)
    programs.start(lambda: pytest.fail("started"), ROOT / "configs", "What it does.")
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in EXPERIMENTS]
    assert listed == [each for each in EXPERIMENTS if program(each) == name]
    assert "What it does." in lines and len(lines) < 60 and max(map(len, lines)) <= 120


def test_the_traceback_of_hydras_own_errors_can_be_asked_for(monkeypatch):
    def main():
        raise InputError("mistake")

    monkeypatch.setenv(programs.TRACEBACK, "1")
    with pytest.raises(InputError):
        programs.start(main, ROOT / "configs")


WITHOUT_TORCH = """
import os, runpy, sys
for package in ("torch", "lightning", "timm", "ffcv"):
    sys.modules[package] = None  # an import of it is an error
import hydra.main  # once for all commands
for line in sys.argv[1:]:
    print(">", line, file=sys.stderr, flush=True)
    if os.fork() == 0:
        sys.argv = line.split()
        runpy.run_path(sys.argv[0], run_name="__main__")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)
"""
AT_ONCE = {
    "train.py experiment=tve_vitb module.lrr=1": "no setting module.lrr: did you mean",
    "train.py experiment=tve_vitbb": "no experiment named tve_vitbb: did you mean tve_vitb",
    "train.py experiment=demo/tve ckpt_path=none.ckpt": "no checkpoint at none.ckpt",
    "train.py experiment=linear_head data_dir=/none": "got data.root=/none/imagenette: there is none",
    "train.py experiment=anyhead": "expected a folder of images, got none: give data.root=my/images",
    "eval.py experiment=demo/eval weights=none.pt": "got weights=none.pt: there is no such file",
    "eval.py tasks=[imagenette] data_dir=/none": "got tasks.imagenette.data.root=/none/imagenette",
    "eval.py tasks=[digits] explainers=[tve] explainers.tve.weights=none.pth": "no model at none.pth: train it first",
    "eval.py tasks=[digits] methods=[GAEE]": "got GAEE: did you mean GAE?",
}


@pytest.mark.slow
def test_what_is_missing_or_misspelt_is_said_before_torch_and_lightning_are_imported(tmp_path):
    commands = [f"{command} hydra.run.dir={tmp_path}" for command in AT_ONCE]
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *commands], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = told.stderr.splitlines()
    assert lines[::3] == [f"> {command}" for command in commands] and lines[2::3] == ["1"] * len(commands)
    for line, expected in zip(lines[1::3], AT_ONCE.values(), strict=True):
        assert line.startswith("error: ") and expected in line
