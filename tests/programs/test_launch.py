"""The processes that torchrun starts get the config of the command, whatever flags and overrides chose it."""

import os
import runpy
import sys

import pytest
from commands import QUIET, composed
from fork_server import PATIENCE, fork
from forks import forked
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from explainers.running import processes, record

TWO = ("trainer.devices=2", "data.size.train=16", *QUIET)


@pytest.fixture
def configs(tmp_path):
    """A folder of the user's own configs: a config of another name, an experiment, and an option of a group."""
    folder = tmp_path / "configs"
    for group in ("experiment", "data"):
        (folder / group).mkdir(parents=True)
    (folder / "mine.yaml").write_text("defaults: [train, _self_]\nobjective: val/accuracy\n")
    override = "defaults: [override /target: tiny, override /data: small]\n"
    (folder / "experiment/own.yaml").write_text(
        f"# @package _global_\n{override}name: own\ntitle: job ${{hydra:job.num}} ${{run_name:${{name}}}}\n"
    )
    (folder / "data/small.yaml").write_text("defaults: [digits]\nscraps: 1\n")
    return folder


def keep(cfg, folder, may_differ):
    """Instead of a training: keep the config."""
    (folder / "child.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    (folder / "metrics.json").write_text("{}")
    sys.exit(0)


def child(program, *arguments):
    """One of the processes that torchrun starts."""
    os.environ["LOCAL_RANK"] = "0"
    record.start_record = keep
    GlobalHydra.instance().clear()  # of the process that this one is a fork of
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


class Torchrun:
    """What Popen gives for a torchrun, of which one process runs, as far as its config is there."""

    def __init__(self, command, **_):
        start = command.index("--nproc_per_node=2") + 1
        assert command[1:start] == ["-c", processes.TORCHRUN, "--standalone", "--nproc_per_node=2"]
        self.process = fork(child, *command[start:])

    def wait(self):
        self.process.join(PATIENCE)
        return self.process.exitcode


def stand_in():
    processes.subprocess.Popen = Torchrun


def configs_of(folder):
    """What the command has recorded, and what its process got."""
    recorded, got = (OmegaConf.to_container(OmegaConf.load(folder / name)) for name in ("config.yaml", "child.yaml"))
    assert got["module"].pop("explainer") == got["explainer"]  # the record has it once
    return recorded, got


@pytest.fixture
def run(tmp_path, monkeypatch):
    for name in ("LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments):
        folder = tmp_path / "run"
        command = ("train.py", *arguments, *TWO, f"hydra.sweep.dir={tmp_path / 'sweep'}")
        with forked(*command, folder=folder, prepare=stand_in) as process:
            process.join(PATIENCE)
        assert process.exitcode == 0, (tmp_path / "run.log").read_text()
        return folder

    return run


@pytest.mark.slow
def test_each_job_of_a_sweep_gets_its_own_overrides_and_all_flags(run, configs, tmp_path):
    names = ("tiny", "test_vit2.r160_in1k")  # a file, and a model of timm without one
    run("--config-name", "mine", "-m", f"--config-dir={configs}", "experiment=own", f"target={','.join(names)}")
    pairs = sorted(map(configs_of, (tmp_path / "sweep").glob("*/")), key=lambda pair: pair[0]["title"])
    assert [got for _, got in pairs] == [parent for parent, _ in pairs]
    assert [(got["target"]["model"]["model_name"], got["objective"], got["title"]) for _, got in pairs] == [
        ("vit_tiny_patch16_224", "val/accuracy", "job 0 own,target=tiny"),
        ("test_vit2.r160_in1k", "val/accuracy", "job 1 own,target=test_vit2.r160_in1k"),
    ]


def test_overrides_of_hydra_reach_the_processes_except_those_of_the_sweep_and_the_folder(tmp_path, monkeypatch, capsys):
    passed = ["hydra.verbose=true", "hydra/job_logging=none", "+hydra.job.env_set.TOLD=1"]
    dropped = ["hydra.sweep.dir=x", "hydra.sweeper.max_batch_size=1", "hydra/sweeper=basic", "hydra/launcher=basic"]
    commands = []
    monkeypatch.setattr(processes, "torchrun", lambda count, program: commands.append(program) or 0)
    folder = tmp_path / "it's here"
    composed("seed=5", *passed, *dropped, folder=folder)
    assert processes.launch(OmegaConf.create({"devices": 2, "precision": "32-true", "accelerator": "cpu"}))
    assert capsys.readouterr().out == "starting 2 processes (trainer.devices=1 starts none)\n"
    ((_, *arguments),) = commands
    assert {*passed, "seed=5", "hydra.mode=RUN"} <= set(arguments) and not {*dropped} & set(arguments)
    assert arguments[-1] == "hydra.run.dir='" + str(folder).replace("'", r"\'") + "'"
