"""A sweep whose runs are jobs of SLURM. SLURM's commands are scripts that run a job at once, on this machine."""

import json
import sys

import pytest
from commands import DIGITS, TVE_RUN
from forks import forked

SBATCH = """#!{shell}
cp "$1" {root}/script.sh
export SLURM_JOB_ID=4711 SLURM_JOB_NAME=run SLURM_NNODES=1 SLURM_NTASKS=1
export SLURM_NTASKS_PER_NODE=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NUM_NODES=1
bash "$1" > {root}/job.log 2>&1 &
echo Submitted batch job 4711
"""
SRUN = """#!{shell}
while [ "$1" != {python} ]; do shift; done
exec "$@"
"""
SACCT = """#!{shell}
echo 'JobID|State|NodeList'
echo '4711|RUNNING|here'
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    pytest.importorskip("submitit", reason="submitit is not installed")
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(shell="/bin/bash", root=tmp_path, python=sys.executable))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")


@pytest.mark.slow
def test_a_run_of_a_sweep_is_a_job_with_a_process_for_each_device(slurm, tmp_path):
    options = ("hydra/launcher=slurm", "hydra.launcher.partition=gpu", f"hydra.sweep.dir={tmp_path}/sweep", "name=mine")
    with forked("train.py", "-m", *TVE_RUN, *DIGITS, *options, "seed=3", folder=tmp_path / "unused") as process:
        process.join(150)
    logs = [path.read_text() for path in (tmp_path / "unused.log", tmp_path / "job.log") if path.exists()]
    assert process.exitcode == 0, logs
    script = (tmp_path / "script.sh").read_text().splitlines()
    for option in (
        "partition=gpu",
        "job-name=mine",
        "nodes=1",
        "ntasks-per-node=1",
        "gpus-per-node=1",
        "signal=USR2@120",
    ):
        assert f"#SBATCH --{option}" in script
    (run,) = (path for path in (tmp_path / "sweep").iterdir() if (path / "config.yaml").exists())
    assert json.loads((run / "metrics.json").read_text())["val/loss"] > 0
