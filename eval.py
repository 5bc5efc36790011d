"""Explain and measure: every explainer on every task of one backbone. `python eval.py experiment=quickstart_eval`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.utils import instantiate
from lightning import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from matplotlib import rc_context
from omegaconf import DictConfig, OmegaConf

from datamodules.listing import several
from explainers import posthoc
from explainers.errors import InputError
from explainers.report.publish import publish as publish_results
from explainers.results.file import ResultsFile
from explainers.results.settings import row_keys
from explainers.running import keys, messages, runs
from explainers.running.processes import answer_signals, locked, number_of_processes
from explainers.running.resuming import SharedRun
from explainers.running.unfinished import Unfinished
from explainers.saved.files import atomic, file_name

CONFIGS = Path(__file__).parent / "configs"


def evaluate(cfg: DictConfig) -> None:
    """Write `results.json`, tables, figures, and heatmaps of every task to the folder of the run."""
    check(cfg)
    folder = runs.run_dir()
    resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    data = {task: build_named("tasks", str(task), settings.get("data")) for task, settings in cfg.tasks.items()}
    for images in data.values():
        images.setup("test")  # missing images of the last task show before the first one is measured
    fingerprints = {task: images.fingerprint("test") for task, images in data.items()}
    processes = number_of_processes(cfg.trainer) * cfg.trainer.get("num_nodes", 1)
    for images in data.values():
        runs.check_number_of_images(cfg.trainer, images, "test")
    file = ResultsFile(folder / "results.json", resolved, fingerprints, cfg.fresh, processes)
    missing = {task: names for task in cfg.tasks if (names := file.missing(task)) is not None}
    if runs.launch(cfg.trainer):
        return
    runs.start_record(cfg, folder, go_on=True)
    file.tell()
    for task, names in missing.items():
        runs.seed_all(cfg.seed)  # the same for every task, whichever came before
        evaluation = build(cfg, cfg.tasks[task], names)
        evaluation.target.check_classes(data[task].class_names("test"))
        announce(task, data[task].size("test"), evaluation.forward_passes, evaluation.explainers)
        going_on = Unfinished(folder / "unfinished", task, file.key(task))
        if cfg.fresh:
            going_on.remove()
        shown = [instantiate(cfg.progress, name=task)] if cfg.progress else []
        if cfg.pictures:
            shown.insert(0, instantiate(cfg.pictures, name=task, settings=row_keys(file.settings[task])))
        callbacks = [SharedRun(folder), *shown, going_on]
        trainer = runs.build_trainer(cfg.trainer, callbacks=callbacks, logger=runs.build_all(cfg.get("logger")))
        trainer.test(evaluation, data[task], verbose=False)
        if trainer.is_global_zero and not names and not evaluation.results:  # a study of targets needs no names
            raise InputError("nothing to measure: name explainers, such as explainers=[chance,tve] or methods=[GAE]")
        tell_corrupt(task, data[task].dataset("test"), trainer)
        file.add(task, evaluation)
        going_on.remove()
    publish(cfg)


def check(cfg: DictConfig) -> None:
    """Raise an InputError for settings that nothing reads, are of another type, or leave nothing to do."""
    keys.check_keys(cfg, CONFIGS / "eval.yaml")
    messages.check_types(cfg, seed=int, fresh=bool, overlays=bool)
    if cfg.overlays and not cfg.pictures:
        raise InputError("expected pictures, which overlays=true draws, got pictures=null: leave one of the two out")
    instantiate(cfg.get("reference"))  # a name that it does not have shows before hours of measuring
    own = runs.run_dir() / "results.json"
    if not cfg.tasks and str(own) in cfg.results.files and not own.exists():
        raise InputError("nothing to measure: name tasks, such as tasks=[imagenette], and explainers=[chance,tve]")


def build_named(group: str, name: str, node: DictConfig | None, **given: Any) -> Any:
    """Instantiate what `group=[..., name, ...]` asks for; an experiment may have settings for more than that."""
    if node is None or "_target_" not in node:
        raise InputError(
            f"expected {name} among {group}=[...], got settings of it alone: add it there, or leave its settings out"
            f" (~{group}.{name})"
        )
    for key in given:
        if key in node and not OmegaConf.is_interpolation(node, key):
            raise InputError(
                f"expected {group}.{name}.{key} as it is: eval.py gives the {key} of each task, got {node[key]};"
                f" set {key} itself, or tasks.<name>.{key}"
            )
    return instantiate(node, **given)


def build(cfg: DictConfig, settings: DictConfig, names: list[str]) -> Any:
    """The evaluation of a task: its target, explainers of that target by their names, and the one to compare with."""
    target = instantiate(cfg.target, **(settings.get("target") or {}))
    nodes = OmegaConf.merge(cfg.explainers, settings.get("explainers") or {})
    wanted = {*names, cfg.evaluation.get("reference")}
    explainers = {
        str(name): build_named("explainers", str(name), node, target=target)
        for name, node in nodes.items()
        if name in wanted
    }
    explainers |= posthoc.build_all(cfg.methods, target, instantiate(cfg.grid), wanted)
    only = {"measured": names} if explainers.keys() - set(names) else {}
    return instantiate(cfg.evaluation, target=target, explainers=explainers, **only)


@rank_zero_only
def announce(task: str, images: int, forward_passes: dict[str, int], explainers: Mapping[str, Any]) -> None:
    """Print an estimate of what a task costs, the most expensive first, before it starts."""
    each = sorted(forward_passes.items(), key=lambda item: -item[1])
    vary = [name for name, explainer in explainers.items() if getattr(explainer, "passes_vary", False)]
    parts = ", ".join(f"{name} {'at most ' * (name in vary)}{count}" for name, count in each if count)
    print(f"{task}: {images} images, about {sum(forward_passes.values())} forward passes each ({parts})")


def tell_corrupt(task: str, samples: Any, trainer: Trainer) -> None:
    """Print how many images of a task could not be read in any process, and the names of the first ones."""
    marks = getattr(samples, "corrupt", torch.zeros(0))
    total: Any = trainer.strategy.reduce(marks.int().to(trainer.strategy.root_device), reduce_op="sum")
    corrupt = total.nonzero().flatten().tolist()
    if corrupt and trainer.is_global_zero:
        files = several([samples.path(index) for index in corrupt])
        print(f"{task}: {len(marks) - len(corrupt)} of {len(marks)} images; left out: {files} that cannot be read")


@rank_zero_only
@rc_context({"text.parse_math": False})  # a $ in the name of a class or task is no formula
def publish(cfg: DictConfig) -> None:
    """Tables, figures and the gallery, of what stands in files alone."""
    folder = runs.run_dir()
    table = publish_results(folder, cfg.results.files, instantiate(cfg.get("reference")), cfg.overlays)
    for name, figure in (cfg.get("figures") or {}).items():
        with atomic(folder / f"{file_name(str(name))}.png") as unfinished:
            instantiate(figure).savefig(unfinished, dpi=120)
    pictures = sorted(path.name for path in [*folder.glob("*.png"), *folder.glob("gallery.html")])
    print(table, f"Tables and pictures are in {runs.relative(folder)}: {', '.join(pictures)}", sep="\n")
    if "gallery.html" in pictures:
        print(f"Open {runs.relative(folder)}/gallery.html in a browser")


@hydra.main(config_path="configs", config_name="eval", version_base="1.3")
def main(cfg: DictConfig) -> None:
    runs.quiet_libraries()
    answer_signals()
    with messages.errors_in_one_line(), locked(runs.run_dir()):
        evaluate(cfg)


if __name__ == "__main__":
    messages.start(main, CONFIGS)
