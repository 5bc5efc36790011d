"""Train what the configuration names: an explainer, or a target to explain. `python train.py experiment=tve_vitb`."""

import json
import time
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf

from explainers.running import keys, messages, runs
from explainers.running.commands import next_command
from explainers.running.loggers import forget_later_rows
from explainers.running.processes import answer_signals, locked
from explainers.running.resuming import SharedRun, WholeCheckpoints, checkpoint_to_resume, progress_of, read_json
from explainers.saved.files import write_atomically

CONFIGS = Path(__file__).parent / "configs"


def train(cfg: DictConfig) -> float | None:
    """Fit, validate, test and export one module; returns the metric `objective` for sweeps."""
    keys.check_keys(cfg, CONFIGS / "train.yaml")
    messages.check_types(cfg, seed=int, fit=bool, test=bool)
    folder, start = runs.run_dir(), time.monotonic()
    checkpoint = checkpoint_to_resume(cfg.ckpt_path, folder / "checkpoints" / "last.ckpt")
    steps, metrics = progress_of(checkpoint)
    metrics |= read_json(folder / "metrics.json")
    runs.seed_all(cfg.seed)
    data = images = instantiate(cfg.data)
    if cfg.get("cache") is not None:
        data = instantiate(cfg.cache, data)
    data.setup("fit")  # missing images show before weights are fetched and other processes started
    runs.check_number_of_images(cfg.trainer, images, "val")
    runs.start_record(cfg, folder, go_on=cfg.ckpt_path is not None)
    if runs.launch(cfg.trainer):
        return read_json(folder / "metrics.json").get(cfg.objective)
    module = instantiate(cfg.get("module") or cfg.explainer)
    if cfg.fit or checkpoint is None:
        forget_later_rows(folder, steps)
        trainer = build_trainer(cfg, runs.build_all(cfg.get("logger")), steps)
    else:  # the history of a run that is only measured stays as it is
        trainer = build_trainer(cfg, [], steps)
    if cfg.fit:
        trainer.fit(module, data, ckpt_path=checkpoint)
    else:
        trainer.validate(module, data, ckpt_path=checkpoint, verbose=False)
    # A run that was complete measures nothing new
    metrics |= {name: value.item() for name, value in trainer.callback_metrics.items()}
    if cfg.test:
        trainer.test(module, data, verbose=False)
        metrics |= {name: value.item() for name, value in trainer.callback_metrics.items()}
    write_atomically(folder / "metrics.json", json.dumps(metrics, indent=2))
    untrained = not cfg.fit and is_overridden("training_step", module)
    exports = trainer.is_global_zero and not cfg.trainer.fast_dev_run and (checkpoint is not None or not untrained)
    if exports:
        module.export(folder)
    runs.summarise(cfg, metrics, time.monotonic() - start, measured(cfg, checkpoint) if untrained else "")
    if exports:
        choices = HydraConfig.get().runtime.choices
        print("next:", next_command(cfg, choices, runs.relative(folder), getattr(images, "classes", ())))
    return metrics.get(cfg.objective)


def build_trainer(cfg: DictConfig, loggers: list[Logger], step: int) -> Trainer:
    """Build the trainer of a run that goes on from a step, and log the config."""
    callbacks = [SharedRun(runs.run_dir(), step), *runs.build_all(cfg.get("callbacks"))]
    trainer = runs.build_trainer(cfg.trainer, callbacks=callbacks, logger=loggers, plugins=[WholeCheckpoints()])
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    for logger in trainer.loggers:
        logger.log_hyperparams(settings)
    return trainer


def measured(cfg: DictConfig, checkpoint: Path | None) -> str:
    """What a run of a trainable module without training has measured."""
    if checkpoint is not None:
        return f"measured {runs.relative(checkpoint)}"
    weights = (cfg.get("module") or cfg.explainer).get("weights")
    what = weights or "an untrained network (fit=false without ckpt_path)"
    return f"measured {what}, nothing exported"


@hydra.main(config_path="configs", config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> float | None:
    runs.quiet_libraries()
    answer_signals()
    with messages.errors_in_one_line(), locked(runs.run_dir()):
        return train(cfg)


if __name__ == "__main__":
    messages.start(main, CONFIGS)
