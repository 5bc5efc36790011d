"""Explain and measure: every explainer on every task of one backbone. `python eval.py experiment=demo/eval`."""

from __future__ import annotations  # so that Lightning is imported by what measures, after the command was checked

import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from datamodules.places import check_places
from explainers import posthoc
from explainers.errors import InputError, suggest_names
from explainers.running import program
from explainers.running.folder import run_dir, shorten_path
from explainers.running.processes import check_image_count, count_all_processes, launch
from explainers.running.record import start_record
from explainers.running.rows import announce_rows, hash_files, list_rows
from explainers.running.settings import check_files, check_keys, check_settings, use_weights
from explainers.saved.files import atomic, file_name, is_first_process
from explainers.saved.records import devices, versions

if TYPE_CHECKING:
    from lightning import Trainer

    from explainers.report.results import Row

CONFIGS = Path(__file__).parent / "configs"


def evaluate(cfg: DictConfig) -> None:
    """Write `results.json`, tables, figures, and heatmaps of every task to the folder of the run."""
    from explainers.report.results import join_rows

    check_settings(cfg)
    instantiate(cfg.get("reference"))  # an unknown name is reported before hours of measuring
    with program.once(cfg.trainer):
        data = {task: build_named("tasks", str(task), settings.get("data")) for task, settings in cfg.tasks.items()}
        for images in data.values():
            images.setup("test")  # missing images of the last task are reported before the first task is measured
            check_image_count(cfg.trainer, images, "test")
    config: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    fingerprints = {task: images.fingerprint("test") for task, images in data.items()}
    hashes = hash_files(config)
    rows = list_rows(run_dir(), config, fingerprints, hashes, count_all_processes(cfg.trainer))
    missing = {task: [row for row in own if cfg.fresh or not row.path.exists()] for task, own in rows.items()}
    if launch(cfg.trainer):
        return
    start_record(cfg, run_dir(), may_differ=True)
    run = {"command": sys.argv, "python": platform.python_version(), "packages": versions(), "devices": devices()}
    for task in rows:
        announce_rows(task, rows[task], missing[task])
    for task, images in data.items():
        if missing[task] or not rows[task]:
            measure(cfg, task, missing[task], images, run)
        elif cfg.pictures and not isinstance(cfg.pictures.classes, int):
            print(f"{task}: pictures of the earlier command stay (fresh=true explains pictures.classes)")
        if is_first_process():  # after each task, so that a kill leaves what is measured
            measured = [row for own in rows.values() for row in own if row.path.exists()]
            described = {"config": config, "files": hashes, "data": fingerprints}
            join_rows(run_dir() / "results.json", measured, **described)
    publish(cfg)


def check(cfg: DictConfig) -> None:
    """Raise an InputError for what is misspelt or missing in a command; `weights` becomes settings of the target."""
    check_keys(cfg, CONFIGS / "eval.yaml")
    use_weights(cfg)
    if cfg.overlays and not cfg.pictures:
        raise InputError("expected pictures, which overlays=true draws, got pictures=null: remove one of the two")
    own = run_dir() / "results.json"
    if not cfg.tasks and str(own) in cfg.results.files and not own.exists():
        raise InputError("nothing to measure: name tasks, such as tasks=[imagenette], and explainers=[chance,tve]")
    for task, settings in cfg.tasks.items():
        check_named("tasks", str(task), settings.get("data"))
        check_places(f"tasks.{task}.data", settings.data, ("test",))
    for name, node in cfg.explainers.items():
        check_named("explainers", str(name), node)
    check_methods(OmegaConf.to_container(cfg.methods) if OmegaConf.is_list(cfg.methods) else [])
    check_files(cfg, starts=not own.exists())


def check_methods(methods: Any) -> None:
    """Raise an InputError for a method that does not exist; what else is wrong with one shows when it is built."""
    for method in methods:
        name = str(next(iter(method), "") if isinstance(method, dict) else method).partition("-")[0]
        known = posthoc.method_names()
        if not {name, name.removeprefix("Libra")} & {*known}:
            raise InputError(f"expected a method of explainers.posthoc, got {name}: {suggest_names(name, known)}")


def measure(cfg: DictConfig, task: str, rows: list[Row], images: Any, run: dict[str, Any]) -> None:
    """Measure rows on the images of their task, and write each to its file with a record of this command."""
    from lightning import seed_everything

    from callbacks.labels import LabelsAsLogits
    from callbacks.resume_test import ResumeTest
    from explainers.models.names import match_classes
    from explainers.running.trainer import CheckSharedFolder, build_all, build_trainer

    if not rows:
        raise InputError("nothing to measure: name explainers, such as explainers=[chance,tve] or methods=[GAE]")
    seed_everything(cfg.seed, workers=True, verbose=False)  # each task starts with the same seed
    evaluation = build(cfg, cfg.tasks[task], [row.explainer for row in rows])
    labels = LabelsAsLogits(match_classes(images.class_names("test"), evaluation.target))
    announce(task, images.size("test"), evaluation)
    keys = {row.explainer: row.key for row in rows}
    unfinished = ResumeTest(run_dir() / "unfinished", task, ",".join(keys.values()))
    if cfg.fresh:
        unfinished.remove()
    pictures = [instantiate(cfg.pictures, name=task, keys=keys)] if cfg.pictures else []
    progress = [instantiate(cfg.progress, name=task)] if cfg.progress else []
    callbacks = [CheckSharedFolder(run_dir()), labels, *pictures, *progress, unfinished]
    trainer = build_trainer(cfg.trainer, callbacks=callbacks, logger=build_all(cfg.get("logger")))
    trainer.test(evaluation, images, verbose=False)
    if hasattr(images, "dataset"):  # FFCV has none
        print_corrupt(task, images.dataset("test"), trainer)
    for row in rows:
        row.write(evaluation, run)
    unfinished.remove()


def check_named(group: str, name: str, node: DictConfig | None) -> None:
    """Raise an InputError unless `group=[...]` names a member; an experiment may have settings of it all the same."""
    if node is None or "_target_" not in node:
        raise InputError(
            f"expected {group}=[...] to name {name}, got only settings of it: add {name} to the list, or remove its"
            f" settings (~{group}.{name})"
        )


def build_named(group: str, name: str, node: DictConfig | None, **given: Any) -> Any:
    """Instantiate a member of `group=[..., name, ...]`."""
    check_named(group, name, node)
    assert node is not None
    for key in given:
        if key in node and not OmegaConf.is_interpolation(node, key):
            raise InputError(
                f"expected no {group}.{name}.{key}, because eval.py sets it to the {key} of each task, got {node[key]}:"
                f" set {key} itself, or tasks.<name>.{key}"
            )
    return instantiate(node, **given)


def build(cfg: DictConfig, settings: DictConfig, names: list[str]) -> Any:
    """Build the evaluation of a task, with the task's target, the named explainers and the reference."""
    target = instantiate(cfg.target, **(settings.get("target") or {})).eval()  # explainers copy one in training mode
    nodes = OmegaConf.merge(cfg.explainers, settings.get("explainers") or {})
    wanted = {*names, cfg.evaluation.get("reference")}
    explainers = {
        str(name): build_named("explainers", str(name), node, target=target)
        for name, node in nodes.items()
        if name in wanted
    }
    explainers |= posthoc.build_all(cfg.methods, target, instantiate(cfg.grid), wanted)
    return instantiate(cfg.measurement)(target, explainers, instantiate(cfg.evaluation), names)


def announce(task: str, images: int, evaluation: Any) -> None:
    """Print an estimate of what a task costs before it starts, the most expensive explainers first."""
    if not is_first_process():
        return
    passes = evaluation.forward_passes
    parts = []
    for name in sorted(passes, key=passes.__getitem__, reverse=True):
        most = "at most " if getattr(evaluation.explainers.get(name), "passes_vary", False) else ""
        parts += [f"{name} {most}{passes[name]}"] if passes[name] else []
    print(f"{task}: {images} images, about {sum(passes.values())} forward passes each ({', '.join(parts)})")


def print_corrupt(task: str, samples: Any, trainer: Trainer) -> None:
    """Print how many images of a task could not be read, in all processes together, and the names of the first ones."""
    import torch

    from explainers.images.listing import several

    marks = getattr(samples, "corrupt", torch.zeros(0))  # 1 for an image that this process could not read
    total: Any = trainer.strategy.reduce(marks.int().to(trainer.strategy.root_device), reduce_op="sum")
    corrupt = total.nonzero().flatten().tolist()
    if corrupt and trainer.is_global_zero:
        files = several([samples.path(index) for index in corrupt])
        print(f"{task}: {len(marks) - len(corrupt)} of {len(marks)} images; left out: {files} that cannot be read")


def publish(cfg: DictConfig) -> None:
    """Write tables, figures and the gallery from the files of results and pictures."""
    if not is_first_process():
        return
    from matplotlib import rc_context

    from explainers.report.publish import publish as publish_results

    folder = run_dir()
    every_class = bool(cfg.pictures) and not isinstance(cfg.pictures.classes, int)
    reference, minus = instantiate(cfg.get("reference")), cfg.differences
    with rc_context({"text.parse_math": False}):  # a $ in the name of a class or task begins no formula
        table = publish_results(folder, cfg.results.files, reference, cfg.overlays, every_class, minus)
        for name, figure in (cfg.get("figures") or {}).items():
            with atomic(folder / f"{file_name(str(name))}.png") as unfinished:
                instantiate(figure).savefig(unfinished, dpi=120)
        shown = instantiate(cfg.summary) if cfg.summary else table
    pictures = sorted(path.name for path in [*folder.glob("*.png"), *folder.glob("gallery.html")])
    print(shown, f"Tables and pictures are in {shorten_path(folder)}: {', '.join(pictures)}", sep="\n")
    if "gallery.html" in pictures:
        print(f"Open {shorten_path(folder)}/gallery.html in a browser")


@hydra.main(config_path="configs", config_name="eval", version_base="1.3")
def main(cfg: DictConfig) -> None:
    with program.command(check, cfg):
        evaluate(cfg)


if __name__ == "__main__":
    program.start(main)
