"""Every documented sweep: each job has a folder and a name of its own, and the next command finds its files.

Hydra composes and launches the jobs; instead of training, each says where it would. Real ones are in
test_processes.py, and in test_submitit.py as jobs of SLURM.
"""

import os
import re
import shlex
import subprocess
from math import prod

import pytest
from commands import ROOT, composed_once
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from explainers.running.folder import run_dir, shorten_path
from explainers.saved.records import leaves

PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.sh")]
DOMAINS = "plain,inverted,coloured,small"
VARIABLES = {"DOMAINS": DOMAINS, "1": "x", "W": "target=vit_tiny"}  # of the shell; the others differ in no job
QUIET = r"hydra/hydra_logging=\S+|callbacks\.\S+=null|trainer[.=]\S+|data_dir=\S+"
CALLED = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/logger/wandb.yaml"))["wandb"]["name"]


def number_of_jobs(command):
    overrides = OverridesParser.create().parse_overrides(shlex.split(command))
    return prod(len([*each.sweep_string_iterator()]) for each in overrides if each.is_sweep_override())


def documented():
    """The overrides of every sweep that a page, the head of a config, or a target of make names; of two domains."""
    texts = [path.read_text() for path in PAGES]
    texts += [re.sub("^#", "", path.read_text(), flags=re.MULTILINE) for path in (ROOT / "configs").rglob("*.yaml")]
    texts += [subprocess.run(["make", "-n", "demo", "demo-vectors"], cwd=ROOT, capture_output=True, text=True).stdout]
    found = re.findall(r"train\.py -m ([^\n`&]*)", "\n".join(texts).replace("\\\n", " "))
    shell = r'"?\$(?:\{@:2\}|(\w+))"?'
    found = [re.sub(shell, lambda name: VARIABLES.get(name[1], ""), command) for command in found]
    no_slurm = [re.sub(r"hydra[/.]launcher\S*=\S+", "", command.replace(DOMAINS, "plain,small")) for command in found]
    commands = [" ".join(re.sub(QUIET, "", command).split()) for command in no_slurm]
    largest = {}
    for command in sorted({*commands}, key=number_of_jobs):  # of those with the same keys, the one with most values
        largest[tuple(sorted(word.partition("=")[0] for word in command.split())) + (command.split()[0],)] = command
    return sorted(largest.values())


COMMANDS = documented()

pytestmark = pytest.mark.slow  # and so in one process, which composes the jobs once


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A function that runs a sweep, and returns the folder and the name for W&B of each of its jobs."""
    place, known = tmp_path_factory.mktemp("sweeps"), {}

    def run(command):
        if command in known:
            return known[command]
        jobs = known[command] = []
        earlier, of_others = os.getcwd(), HydraConfig.instance().cfg
        os.chdir(place)
        try:
            with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
                GlobalHydra.instance().hydra.multirun("train", said_by(jobs), shlex.split(command), False)
        finally:
            os.chdir(earlier)
            HydraConfig.instance().cfg = of_others
        return jobs

    return run


def said_by(jobs):
    def say(cfg):
        jobs.append((str(shorten_path(run_dir())), OmegaConf.create({"name": cfg.name, "called": CALLED}).called))

    return say


@pytest.mark.situation(41)
@pytest.mark.parametrize("command", COMMANDS)
def test_each_job_of_a_sweep_has_its_own_folder_and_name(command, sweep):
    folders, names = zip(*sweep(command), strict=True)
    assert len({*folders}) == len({*names}) == len(folders) == number_of_jobs(command)
    assert all(folder.startswith("runs/") for folder in folders)


@pytest.mark.parametrize(
    ("command", "jobs"),
    [
        (
            "experiment=tve_vitb target=tiny,swin_base seed=0,1",
            {f"tve_{target},seed={seed}" for target in ("tiny", "swin_base") for seed in (0, 1)},
        ),
        ("experiment=linear_head data=cars,dtd name=x", {"x,data=cars", "x,data=dtd"}),
        ("experiment=anyhead data.root=a/images,b", {"anyhead_images_vit_tiny,", "anyhead_b_vit_tiny,data.root=b"}),
    ],
)
def test_a_job_is_called_after_the_overrides_in_which_it_differs(command, jobs, sweep):
    folders, names = zip(*sweep(command), strict=True)
    assert {*names} == {folder.removeprefix("runs/") for folder in folders}
    for name in jobs:
        assert any(given == name or name.endswith(",") and given.startswith(name) for given in names), names


def test_evaluations_find_the_files_of_the_documented_sweeps(sweep):
    left = {folder for command in COMMANDS for folder, _ in sweep(command)}
    for evaluation in ("demo/eval", "demo/vectors_eval", "studies/anyhead"):
        cfg = composed_once("eval", f"experiment={evaluation}")
        settings = OmegaConf.to_container(OmegaConf.masked_copy(cfg, ["tasks", "explainers", "figures"]))
        of_sweeps = r"runs/.*(_head|_sweep|_predicting|_vector)/"
        read = {str(value) for _, value in leaves(settings) if re.match(of_sweeps, str(value))}
        assert read and all(any(file.startswith(f"{folder}/") for folder in left) for file in read)
