"""Train what the configuration names: an explainer, or a target to explain. `python train.py experiment=tve_vitb`."""

import json
import time
from pathlib import Path

import hydra
from hydra.utils import instantiate
from lightning import seed_everything
from omegaconf import DictConfig, OmegaConf

from explainers import runs
from explainers.errors import InputError
from explainers.files import write_atomically


def train(cfg: DictConfig) -> float | None:
    """Fit, validate, test and export one module; returns the metric `objective` for sweeps."""
    folder, start = runs.run_dir(), time.monotonic()
    checkpoint = checkpoint_to_resume(cfg.ckpt_path, folder / "checkpoints" / "last.ckpt")
    seed_everything(cfg.seed, workers=True, verbose=False)
    data = instantiate(cfg.data)
    if cfg.get("cache") is not None:
        data = instantiate(cfg.cache, data)
    data.setup("fit")  # missing images show before weights are fetched and other processes started
    runs.start_record(cfg, folder, go_on=cfg.ckpt_path is not None)
    if runs.launch(runs.number_of_processes(cfg.trainer)):
        return json.loads((folder / "metrics.json").read_text()).get(cfg.objective)
    module = instantiate(cfg.get("module") or cfg.explainer)
    callbacks, loggers = runs.build_all(cfg.get("callbacks")), runs.build_all(cfg.logger)
    trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
    for logger in trainer.loggers:
        logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True))
    if cfg.fit:
        trainer.fit(module, data, ckpt_path=checkpoint)
    else:
        trainer.validate(module, data, verbose=False)
    # A run that was complete measures nothing new
    metrics = json.loads((folder / "metrics.json").read_text()) if (folder / "metrics.json").exists() else {}
    metrics |= {name: value.item() for name, value in trainer.callback_metrics.items()}
    if cfg.test:
        trainer.test(module, data, verbose=False)
        metrics |= {name: value.item() for name, value in trainer.callback_metrics.items()}
    write_atomically(folder / "metrics.json", json.dumps(metrics, indent=2))
    if trainer.is_global_zero and not trainer.fast_dev_run:
        module.export(folder)
    runs.summarise(cfg, metrics, time.monotonic() - start)
    return metrics.get(cfg.objective)


def checkpoint_to_resume(asked: str | None, last: Path) -> Path | None:
    """The checkpoint to go on from: the run's last one by default, or the one that was asked for.

    Raises:
        InputError: if the one that was asked for is not there.
    """
    if asked is None:
        return last if last.exists() else None
    path = last if asked == "last" else Path(asked)
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}: leave ckpt_path out to start a new run, or correct the path")
    return path


@hydra.main(config_path="configs", config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> float | None:
    runs.quiet_libraries()
    with runs.errors_in_one_line():
        return train(cfg)


if __name__ == "__main__":
    main()
