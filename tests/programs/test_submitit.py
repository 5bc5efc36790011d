"""A sweep whose runs are jobs of SLURM. Stand-ins for SLURM's commands accept a job, which then runs in a fork."""

import json
import os
import shlex
from functools import partial

import pytest
from commands import DIGITS, ROOT, TVE_RUN
from fork_server import PATIENCE
from forks import Started, forked, wait_for

COMMANDS = {
    "sbatch": 'cp "$1" {root}/script.sh; echo Submitted batch job 4711',
    "sacct": "echo 'JobID|State|NodeList'; echo '4711|RUNNING|here'",
    "srun": "exit 1",
}
JOB = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "mine", "SLURM_NTASKS": "1"}
JOB |= {name: "0" for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The folder of what SLURM was asked."""
    pytest.importorskip("submitit", reason="submitit is not installed")
    for name, text in COMMANDS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text.format(root=tmp_path)}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path


def run_job(place):
    """What the script of a job runs on a machine."""
    from submitit.core.submission import process_job

    os.chdir(ROOT)
    command = shlex.split((place / "script.sh").read_text().splitlines()[-1])
    process_job(command[-1].replace("%j", "4711"))


def be_job():
    os.environ.update(JOB)


@pytest.mark.slow
def test_a_run_of_a_sweep_is_a_job_with_a_process_for_each_device(slurm):
    options = ("hydra/launcher=slurm", "hydra.launcher.partition=gpu", f"hydra.sweep.dir={slurm}/sweep", "name=mine")
    with forked("train.py", "-m", *TVE_RUN, *DIGITS, *options, "seed=3", folder=slurm / "unused") as process:
        submitted = slurm / "sweep/.submitit/4711/4711_submitted.pkl"
        wait_for(submitted.exists, "no job was submitted")
        code, output = Started(partial(run_job, slurm), slurm / "job.log", be_job).end()
        assert code == 0, output
        process.join(PATIENCE)
    assert process.exitcode == 0, (slurm / "unused.log").read_text()
    script = (slurm / "script.sh").read_text().splitlines()
    for option in (
        *("partition=gpu", "job-name=mine", "nodes=1", "ntasks-per-node=1", "gpus-per-node=1", "signal=USR2@120"),
        "time=1440",
    ):
        assert f"#SBATCH --{option}" in script
    (run,) = (path for path in (slurm / "sweep").iterdir() if (path / "config.yaml").exists())
    assert json.loads((run / "metrics.json").read_text())["val/loss"] > 0
