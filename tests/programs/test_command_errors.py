"""A mistake in a command ends in one line that names what was meant."""

import subprocess
import sys

import pytest
from commands import DIGITS, ROOT, evaluate, train
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from test_configs import EXPERIMENTS, program
from test_errors import DIGITS_EVALUATION, error

from explainers.errors import InputError
from explainers.running import program as programs

TRAINING = ("target=tiny", *DIGITS, "explainers@explainer=tve", "logger=csv", "callbacks=train")
COMMANDS = {
    ("train", "trainer.max_epoch=3"): ("trainer.max_epoch", "max_epochs"),
    ("train", "Experiment=tve_vitb"): ("Experiment", "experiment?"),
    ("train", "explainer.lr=1"): ("explainer.lr", "module.optimizer.lr?"),
    ("train", "data=digitz"): ("data named digitz", "digits?"),
    ("train", "target=vit_smal_patch16_224"): ("vit_smal_patch16_224", "vit_small_patch16_"),
    ("train", "target=qqqq"): ("qqqq", "clip_vit_b16"),
    ("train", "experiment=tve_vitg"): ("tve_vitg", "tve_vitb"),
    ("eval", "experiment=skipplus"): ("skipplus", "papers/skipplus"),
    ("train", "hydra/launcher=slurmm"): ("hydra/launcher named slurmm", "slurm?"),
    ("train", "explainers=[chance]"): ("explainers", "explainers@explainer"),
    ("train", "experiment=explain"): ("run python eval.py experiment=explain",),
    ("train", "callbacks=null"): ("NoneType",),
    ("train", "trainer.max_epochs"): ("trainer.max_epochs: ",),
    ("eval", "classes=label"): ("classes", "pictures.classes, evaluation.classes?"),
    ("eval", "explainers.tve.weights=file"): ("explainers.tve",),
    ("train", "weights=epoch=3.pth"): ("weights=epoch=3.pth", "quote"),
    ("eval", "tasks=[imagenete]"): ("tasks named imagenete", "imagenette"),
}
"""Program and override → the parts of the line."""


@pytest.mark.situation(21)
@pytest.mark.parametrize(("name", "override"), COMMANDS, ids=str)
def test_a_command_that_cannot_be_composed_says_what_was_meant_in_one_line(name, override, monkeypatch):
    def main():
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            compose(name, sys.argv[1:])

    monkeypatch.setattr(sys, "argv", [f"/somewhere/{name}.py", "target=tiny", override])
    for variable in (programs.TRACEBACK, programs.CAUGHT):
        monkeypatch.setenv(variable, "")  # restored afterwards
    monkeypatch.delenv(programs.CAUGHT)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    with pytest.raises(SystemExit) as ending:
        programs.start(main)
    line = ending.value.code
    assert line.startswith("error: ") and "\n" not in line and all(part in line for part in COMMANDS[name, override])


RUNS = {
    ("train", "trainer.max_epochs=three"): "trainer.max_epochs",
    ("train", "explainer.hops=1"): "explainer.hops",
    ("train", "fit=perhaps"): "fit",
    ("train", "+explainer.network.misspelt=1"): "misspelt",
    ("train", "+callbacks.progress.misspelt=1"): "misspelt",
    ("train", "+trainer.misspelt=1"): "misspelt",
    ("train", "explainers@explainer=anyhead module=anyhead module.loss=propagation"): "teacher@module.loss=propagation",
    ("train", "trainer.devices=0"): "trainer.devices",
    ("train", "trainer.precision=bf16-true"): "trainer.precision",
    ("train", "seed=-1"): "seed",
    ("train", "direct=[1]"): "no setting direct: ",
    ("train", "title=${nothing}"): "'nothing'",
    ("train", "target=timm"): "target=vit_small_patch16_224",
    ("train", "target=vit_so400m_patch14_siglip_384"): "++target.model.img_size=[378,378]",
    ("train", "++target.model.widht=1"): "'widht'",
    ("train", "data.size.val=1 trainer.devices=2"): "trainer.devices",
    ("eval", "evaluation.classes=predictd"): "classes predicted or label, got predictd",
    ("eval", "evaluation.reference=orakel"): "reference",
    ("eval", "explainers=[] methods=[]"): "explainers=",
    ("eval", "methods=GradCAM"): "methods=[GAE]",
    ("eval", "pictures=null overlays=true"): "overlays=true",
    ("eval", "target=digits target.model.checkpoint_path='' methods=[GAE]"): "a transformer with blocks",
    ("eval", "reference=paper reference.target=ViT-Huge"): "ViT-Huge",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overrides"), RUNS, ids=str)
def test_a_command_with_a_value_that_cannot_be_says_what_was_expected_in_one_line(name, overrides, tmp_path):
    run, command = (train, TRAINING) if name == "train" else (evaluate, DIGITS_EVALUATION)
    assert RUNS[name, overrides] in error(run, *command, *overrides.split(), folder=tmp_path)


@pytest.mark.parametrize("name", ["train", "eval"])
def test_help_lists_the_experiments_of_the_program_alone(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    programs.start(lambda: pytest.fail("started"))
    listed = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip() in EXPERIMENTS]
    assert listed == [each for each in EXPERIMENTS if program(each) == name]


def test_the_traceback_of_hydras_own_errors_can_be_asked_for(monkeypatch):
    def main():
        raise InputError("mistake")

    monkeypatch.setenv(programs.TRACEBACK, "1")
    with pytest.raises(InputError):
        programs.start(main)


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
    "train.py experiment=tve_vitb module.lrr=1": "no setting module.lrr: ",
    "train.py experiment=tve_vitbb": "no experiment named tve_vitbb: did you mean tve_vitb",
    "train.py experiment=tve_vitb seed=first": "full_key: seed",
    "train.py experiment=demo/tve ckpt_path=none.ckpt": "no checkpoint at none.ckpt",
    "train.py experiment=linear_head data_dir=/none": "data.root=/none/imagenette",
    "train.py experiment=anyhead": "data.root=my/images",
    "eval.py experiment=demo/eval weights=none.pt": "weights=none.pt",
    "eval.py tasks=[imagenette] data_dir=/none": "tasks.imagenette.data.root=/none/imagenette",
    "eval.py tasks=[digits] explainers=[tve] explainers.tve.weights=none.pth": "no model at none.pth",
    "eval.py tasks=[digits] methods=[GAEE]": "GAEE: did you mean GAE?",
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
