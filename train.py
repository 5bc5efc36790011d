"""Train what the configuration names: an explainer, or a target to explain. `python train.py experiment=tve_vitb`."""

from __future__ import annotations  # so that Lightning is imported by what trains, after the command was checked

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from datamodules.places import check_places
from explainers.errors import InputError
from explainers.running import program
from explainers.running.folder import quote, run_dir, shorten_path
from explainers.running.processes import check_image_count, launch
from explainers.running.record import CHECKPOINTS, METRICS, find_checkpoint, read_json, start_record, write_metrics
from explainers.running.settings import check_files, check_keys, check_settings, use_random_weights, use_weights
from explainers.saved.files import is_first_process

if TYPE_CHECKING:
    from lightning import Trainer

CONFIGS = Path(__file__).parent / "configs"

TIMM_ARGUMENTS = {"_target_", "model_name", "pretrained", "checkpoint_path", "pretrained_cfg_overlay", "num_classes"}
"""Settings of a model of timm that its name and a file of weights say, too."""


def check(cfg: DictConfig) -> None:
    """Raise an InputError for what is misspelt or missing in a command; `weights` becomes settings of the target."""
    check_keys(cfg, CONFIGS / "train.yaml")
    use_weights(cfg)
    if cfg.trainer.fast_dev_run:
        use_random_weights(cfg)
    find_checkpoint(cfg.ckpt_path, own_checkpoint())
    splits = ("train", "val", "test") if cfg.test else ("train", "val")
    check_places("data", cfg.data, splits, OmegaConf.select(cfg, "target.model.model_name"))
    check_files(cfg, starts=not (run_dir() / METRICS).exists())


def own_checkpoint() -> Path:
    """The checkpoint that this run resumes from."""
    return run_dir() / CHECKPOINTS / "last.ckpt"


def train(cfg: DictConfig) -> float | None:
    """Fit, validate, test and export one module; returns the metric `objective` for sweeps."""
    from lightning import seed_everything

    from explainers.running.trainer import read_progress

    check_settings(cfg)
    folder, start = run_dir(), time.monotonic()
    checkpoint = find_checkpoint(cfg.ckpt_path, own_checkpoint())
    step, epoch, metrics = read_progress(checkpoint)
    for setting, done in (("max_steps", step), ("max_epochs", epoch)):
        if cfg.fit and 0 < (cfg.trainer[setting] or 0) < done:
            raise InputError(f"expected trainer.{setting}={done} or more, which this run has done", setting)
    metrics |= read_json(folder / METRICS)
    seed_everything(cfg.seed, workers=True, verbose=False)
    with program.once(cfg.trainer):
        images = instantiate(cfg.data)
        data = images if cfg.get("cache") is None else instantiate(cfg.cache, images)
        data.setup("fit")  # missing images are reported before weights are fetched and other processes started
    check_image_count(cfg.trainer, images, "val")
    start_record(cfg, folder, may_differ=cfg.ckpt_path is not None)
    if is_measured(cfg, metrics):
        note = "measured before, nothing to do; delete the folder to repeat it"
        summarise(cfg, metrics, time.monotonic() - start, note)
        return metrics[cfg.objective]
    if launch(cfg.trainer):
        return read_json(folder / METRICS).get(cfg.objective)
    module = instantiate(cfg.module)
    trainer = build_run_trainer(cfg, checkpoint, step)
    metrics |= fit_and_measure(cfg, trainer, module, data, checkpoint)
    if not cfg.trainer.fast_dev_run:
        write_metrics(folder / METRICS, metrics, cfg.objective)
    wanted = cfg.export or not cfg.fit and checkpoint is not None
    exports = wanted and trainer.is_global_zero and not cfg.trainer.fast_dev_run
    if exports:
        module.export(folder)
    summarise(cfg, metrics, time.monotonic() - start, "" if cfg.fit or cfg.export else name_weights(cfg, checkpoint))
    if exports and cfg.next:
        print("next:", next_command(cfg, str(HydraConfig.get().runtime.choices.get("target")), shorten_path(folder)))
    return metrics.get(cfg.objective)


def is_measured(cfg: DictConfig, metrics: Mapping[str, float]) -> bool:
    """Whether an earlier command with fit=false and export=true has left all that this one would, as a sweep of λ₂.

    Args:
        cfg: the config of the run, which is that of the earlier command.
        metrics: its metrics.
    """
    tested = not cfg.test or any(name.startswith("test/") for name in metrics)
    left = cfg.objective in metrics and tested and (run_dir() / "model.safetensors").is_file()
    return left and cfg.export and not cfg.fit and not cfg.trainer.fast_dev_run


def build_run_trainer(cfg: DictConfig, checkpoint: Path | None, step: int) -> Trainer:
    """Build the trainer of a run that starts, or resumes from a checkpoint of a step; its loggers record the config."""
    from explainers.running.loggers import forget_later_rows
    from explainers.running.trainer import AtomicCheckpointIO, CheckSharedFolder, build_all, build_trainer

    loggers = []
    if cfg.fit or checkpoint is None:  # a run that is only measured keeps its history
        forget_later_rows(run_dir(), step)
        loggers = build_all(cfg.get("logger"))
    callbacks = [CheckSharedFolder(run_dir(), step), *build_all(cfg.get("callbacks"))]
    trainer = build_trainer(cfg.trainer, callbacks=callbacks, logger=loggers, plugins=[AtomicCheckpointIO()])
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    for logger in trainer.loggers:
        logger.log_hyperparams(settings)
    return trainer


def fit_and_measure(
    cfg: DictConfig, trainer: Trainer, module: Any, data: Any, checkpoint: Path | None
) -> dict[str, float]:
    """Fit or only validate, then test if the config asks for it; returns the metrics, none if no step was left."""
    if cfg.fit:
        trainer.fit(module, data, ckpt_path=checkpoint)
    else:
        trainer.validate(module, data, ckpt_path=checkpoint, verbose=False)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    if cfg.test:
        trainer.test(module, data, verbose=False)
        metrics |= {name: value.item() for name, value in trainer.callback_metrics.items()}
    return metrics


def name_weights(cfg: DictConfig, checkpoint: Path | None) -> str:
    """Name the weights that were measured by a run that did not train its module."""
    if checkpoint is not None:
        return f"measured {shorten_path(checkpoint)}"
    weights = (cfg.get("explainer") or cfg.module).get("weights")
    what = weights or "an untrained network (fit=false without ckpt_path)"
    return f"measured {what}, nothing exported"


def summarise(cfg: DictConfig, metrics: Mapping[str, float], seconds: float, note: str = "") -> None:
    """Print one line: what a run did, its metrics, its duration and its folder.

    Args:
        cfg: the config of the run.
        metrics: name → value.
        seconds: duration.
        note: a remark on the metrics.
    """
    if not is_first_process():
        return
    shown = {name: metrics[name] for name in (cfg.objective, "val/accuracy") if name in metrics}
    values = ", ".join(f"{name} {value:.3g}" for name, value in shown.items())
    line = "; ".join(part for part in (values, note, f"{seconds:.0f} s, {shorten_path(run_dir())}") if part)
    print(f"{cfg.title or cfg.name}: {line}")


def next_command(cfg: DictConfig, target: str, folder: Path) -> str:
    """The command that uses what a training left; for models that no command explains, what loads them in Python.

    Args:
        cfg: the config of the training.
        target: the chosen file of configs/target, or a name of timm.
        folder: its folder, relative to the working directory.
    """
    module: Any = OmegaConf.to_container(cfg.module, resolve=True)
    settings: Any = OmegaConf.to_container(cfg.target, resolve=True)
    kind, model = module["_target_"].rpartition(".")[2], settings.get("model") or {}
    if kind == "Surrogate":
        surrogate, name = quote(f"{folder}/target.safetensors"), quote(f"{folder.name}_fastshap")
        own = [f"target={target}", f"explainer.surrogate={surrogate}", f"name={name}"]
        fastshap = ["experiment=vit_shapley", "explainers@explainer=fastshap", "cache=none"]  # it explains any target
        return shlex.join(["python", "train.py", *fastshap, *own])
    overlay = model.get("pretrained_cfg_overlay") or {}
    file = (cfg.get("explainer") or {}).get("surrogate") or model.get("checkpoint_path") or overlay.get("file")
    weights, of_timm = ["--weights", file] if file else [], not model.keys() - TIMM_ARGUMENTS
    explain = ["explainers", "explain", "my/photo.jpg"]
    if kind == "Classifier" and not of_timm:
        return f"the model is in {folder}"
    if kind == "Classifier":
        head = ["--head", f"{folder}/head.safetensors"]
        trained = ["--weights", f"{folder}/target.safetensors"] if module["tune"] == "all" else [*weights, *head]
        return shlex.join([*explain, "--model", model["model_name"], *trained])
    functionals = (module.get("loss") or {}).get("functionals", "head")
    if kind != "ExplainerTraining" or functionals in ("texts", "images", "isotropic"):  # there are no classes
        return f'explainers.load("{folder}") in Python'
    if not of_timm or not (file or model.get("pretrained")):
        return f'explainers.load("{folder}", target=...) in Python'
    own = ["--model", model["model_name"], *weights] if file else []  # the explainer names a model of timm itself
    return shlex.join([*explain, "--explainer", str(folder), *own])


@hydra.main(config_path="configs", config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> float | None:
    with program.command(check, cfg):
        return train(cfg)


if __name__ == "__main__":
    program.start(main)
