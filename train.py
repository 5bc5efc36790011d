"""Train what the configuration names: an explainer, or a target to explain. `python train.py experiment=tve_vitb`."""

import json

import hydra
from hydra.utils import instantiate
from lightning import seed_everything
from omegaconf import DictConfig, OmegaConf

from explainers import runs


def train(cfg: DictConfig) -> float | None:
    """Fit, validate, test and export one module; returns the metric `objective` for sweeps."""
    folder = runs.run_dir()
    last, found = folder / "checkpoints" / "last.ckpt", folder / "metrics.json"
    seed_everything(cfg.seed, workers=True)
    data = instantiate(cfg.data)
    data.setup("fit")  # missing images show before weights are fetched and other processes started
    runs.start_record(cfg, folder, go_on=cfg.ckpt_path is not None)
    if runs.launch(runs.number_of_processes(cfg.trainer)):
        return json.loads(found.read_text()).get(cfg.objective)
    module = instantiate(cfg.explainer)
    callbacks, loggers = runs.build_all(cfg.get("callbacks")), runs.build_all(cfg.logger)
    trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
    for logger in trainer.loggers:
        logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True))
    resume = last if cfg.ckpt_path == "last" or (cfg.ckpt_path is None and last.exists()) else cfg.ckpt_path
    if cfg.fit:
        trainer.fit(module, data, ckpt_path=resume)
    else:
        trainer.validate(module, data, verbose=False)
    metrics = json.loads(found.read_text()) if found.exists() else {}  # a run that was complete measures nothing new
    metrics |= {name: value.item() for name, value in trainer.callback_metrics.items()}
    if cfg.test:
        trainer.test(module, data, verbose=False)
        metrics |= {name: value.item() for name, value in trainer.callback_metrics.items()}
    runs.write_atomically(found, json.dumps(metrics, indent=2))
    if trainer.is_global_zero and not trainer.fast_dev_run:
        module.export(folder)
    return metrics.get(cfg.objective)


@hydra.main(config_path="configs", config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> float | None:
    with runs.errors_in_one_line():
        return train(cfg)


if __name__ == "__main__":
    main()
