"""Commands of a user, run in this process, which saves the seconds that a new process takes to import."""

import contextlib
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import open_dict
from PIL import Image

import eval as evaluation
import train as training
from explainers.running.targets import store_targets

ROOT = Path(__file__).parents[1]
PYTHONPATH = f"{ROOT / 'tests'}:{ROOT / 'tests/programs'}"  # so that a config can name what a test defines
SMALL_DIGITS = ("data.size.train=16", "data.size.val=8", "data.size.test=7", "data.batch_size=8")
DIGITS = ("data=digits", *SMALL_DIGITS)
PAPER_NETWORK = dict.fromkeys(("encoder", "decoder"), "{width:24,heads:3,depth:1}")
SMALL_PAPER_NETWORK = tuple(f"explainer.network.{key}={value}" for key, value in PAPER_NETWORK.items()) + (
    "explainer.network.head_layers=3",
    "explainer.network.mae=null",
)
QUIET = ("trainer.enable_model_summary=false", "trainer.accelerator=cpu", "trainer.precision=32-true")
NO_PICTURES = "callbacks=train"  # matplotlib takes longer for them than the training
NO_FIGURES = ("pictures=null", "figures=[]")  # and than the evaluation
SMALL_NETWORK = ("explainers@explainer=tve", "explainer.network.width=24", "explainer.hops=[1]")
TVE_RUN = ("target=tiny", *SMALL_NETWORK, "logger=csv", NO_PICTURES, *QUIET)
TINY_RUN = ("experiment=demo/tve", "target=tiny", "logger=csv", *QUIET, "explainer.network.width=24")


def composed(*overrides, folder, config="train"):
    """The config of `python train.py *overrides`, run in `folder`."""
    cfg = composed_once(config, *overrides)
    with open_dict(cfg):
        cfg.hydra.run.dir = cfg.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(cfg)
        del cfg["hydra"]
    return cfg


def composed_once(config, *overrides):
    """What Hydra composes for these overrides, remembered: it takes long and does not depend on the folder."""
    return pickle.loads(pickled(config, *overrides))


def chooses_files(override):
    """Whether an override says of which files a config is made, or is one of Hydra's own settings."""
    key = override.lstrip("+~").partition("=")[0]
    return "@" in key or "/" in key or key.startswith("hydra") or (ROOT / "configs" / key).is_dir()


@cache
def pickled(config, *overrides):
    """A config. Hydra applies overrides of values to the merged files, which are so for all configs of these files."""
    values = [override for override in overrides if not chooses_files(override)]
    if not values or any(override.lstrip("+~").startswith("hydra") for override in overrides):
        store_targets(overrides)
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            return pickle.dumps(compose(config, ["hydra.mode=RUN", *overrides], return_hydra_config=True))
    cfg = composed_once(config, *filter(chooses_files, overrides))
    ConfigLoaderImpl._apply_overrides_to_config([parsed(override) for override in values], cfg)
    cfg.hydra.overrides.task = list(overrides)
    return pickle.dumps(cfg)


@cache
def parsed(override):
    return OverridesParser.create().parse_override(override)


@contextlib.contextmanager
def one_thread():
    """Use one thread, as forks do, so that both compute the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(*overrides, folder):
    cfg = composed(*overrides, folder=folder)
    with one_thread(), training.program.errors_in_one_line(cfg):
        training.check(cfg)
        return training.train(cfg)


def evaluate(*overrides, folder):
    cfg = composed(*overrides, folder=folder, config="eval")
    with one_thread(), evaluation.program.errors_in_one_line(cfg):
        evaluation.check(cfg)
        evaluation.evaluate(cfg)


def draw_images(folder, count=6, side=72, classes=("cat", "dog")):
    """A folder of class folders of JPEG files."""
    for i in range(count):
        path = Path(folder) / classes[i % len(classes)] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        colours = np.random.default_rng(i).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(colours).resize((side, side + i), Image.Resampling.BICUBIC).save(path)
    return Path(folder)


def csv_rows(path):
    """The rows of a CSV file, as dicts of text."""
    header, *lines = path.read_text().splitlines()
    return [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
