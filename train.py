"""Train what the configuration names: an explainer, or a target to explain. `python train.py experiment=tve_vitb`."""

import json

import hydra
from hydra.utils import instantiate
from lightning import seed_everything
from omegaconf import DictConfig, OmegaConf

from explainers import runs


def train(cfg: DictConfig) -> float | None:
    """Fit, validate and export one module; returns the metric `objective` for sweeps."""
    folder = runs.run_dir()
    if runs.launch(runs.number_of_processes(cfg.trainer)):
        return json.loads((folder / "metrics.json").read_text()).get(cfg.objective)
    last = folder / "checkpoints" / "last.ckpt"
    runs.start_record(cfg, folder, go_on=cfg.ckpt_path is not None)
    seed_everything(cfg.seed, workers=True)
    data = instantiate(cfg.data)
    module = instantiate(cfg.explainer)
    trainer = instantiate(cfg.trainer, callbacks=runs.build_all(cfg.callbacks), logger=runs.build_all(cfg.logger))
    for logger in trainer.loggers:
        logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True))
    resume = last if cfg.ckpt_path in (None, "last") else cfg.ckpt_path
    trainer.fit(module, data, ckpt_path=resume if cfg.ckpt_path not in (None, "last") or last.exists() else None)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    runs.write_atomically(folder / "metrics.json", json.dumps(metrics, indent=2))
    if trainer.is_global_zero and not trainer.fast_dev_run:
        module.export(folder)
    return metrics.get(cfg.objective)


@hydra.main(config_path="configs", config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> float | None:
    with runs.errors_in_one_line():
        return train(cfg)


if __name__ == "__main__":
    main()
