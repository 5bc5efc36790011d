"""Explain and measure: every explainer on every task of one backbone. `python eval.py experiment=quickstart_eval`."""

from typing import Any

import hydra
from hydra.utils import instantiate
from lightning import seed_everything
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from explainers import posthoc, runs
from explainers.errors import InputError
from explainers.evaluation import report
from explainers.evaluation.results import ResultsFile, read_columns
from explainers.files import atomic, write_atomically
from explainers.processes import locked


def evaluate(cfg: DictConfig) -> None:
    """Write `results.json`, tables, figures, and heatmaps of every task to the folder of the run."""
    folder = runs.run_dir()
    if not cfg.tasks and str(folder / "results.json") in cfg.results.files and not (folder / "results.json").exists():
        raise InputError("nothing to measure: name tasks, such as tasks=[imagenette], and explainers=[chance,tve]")
    resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    data = {task: build_named("tasks", str(task), settings.get("data")) for task, settings in cfg.tasks.items()}
    for images in data.values():
        images.setup("test")  # missing images of the last task show before the first one is measured
    fingerprints = {task: images.fingerprint("test") for task, images in data.items()}
    file = ResultsFile(folder / "results.json", resolved, fingerprints, cfg.fresh)
    tasks = {task: settings for task, settings in cfg.tasks.items() if task not in file.kept}
    if runs.launch(runs.number_of_processes(cfg.trainer)):
        return
    runs.start_record(cfg, folder, go_on=True)
    file.tell()
    for task, settings in tasks.items():
        seed_everything(cfg.seed, workers=True, verbose=False)  # the same for every task, whichever came before
        evaluation = build(cfg, settings)
        evaluation.target.check_classes(data[task].class_names("test"))
        announce(task, data[task].size("test"), evaluation.forward_passes)
        callbacks = [instantiate(node, name=task) for node in (cfg.heatmaps, cfg.progress)]
        trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=runs.build_all(cfg.logger))
        trainer.test(evaluation, data[task], verbose=False)
        file.add(task, evaluation)
    publish(cfg)


def build_named(group: str, name: str, node: DictConfig | None, **given: Any) -> Any:
    """Instantiate what `group=[..., name, ...]` asks for; an experiment may have settings for more than that."""
    if "_target_" not in (node or {}):
        raise InputError(
            f"expected {name} among {group}=[...], got settings of it alone: add it there, or leave its settings out"
            f" (~{group}.{name})"
        )
    return instantiate(node, **given)


def build(cfg: DictConfig, settings: DictConfig) -> Any:
    """The evaluation of one task: its target, and explainers of that target."""
    target = instantiate(cfg.target, **(settings.get("target") or {}))
    nodes = OmegaConf.merge(cfg.explainers, settings.get("explainers") or {})
    explainers: dict[Any, Any] = {
        name: build_named("explainers", str(name), node, target=target) for name, node in nodes.items()
    }
    explainers |= posthoc.build_all(cfg.methods, target, instantiate(cfg.grid))
    return instantiate(cfg.evaluation, target=target, explainers=explainers)


@rank_zero_only
def announce(task: str, images: int, forward_passes: dict[str, int]) -> None:
    """Print what a task costs, the dearest first, before it starts."""
    each = sorted(forward_passes.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {count}" for name, count in each if count)
    print(f"{task}: {images} images, {sum(forward_passes.values())} forward passes each ({parts})")


@rank_zero_only
def publish(cfg: DictConfig) -> None:
    """Tables and figures, of what stands in files alone."""
    folder = runs.run_dir()
    results, titles = instantiate(cfg.results), read_columns(cfg.results.files)
    tables = report.tables(results, titles, instantiate(cfg.get("reference")))
    for name, text in tables.items():
        write_atomically(folder / name, text)
    for name, figure in (cfg.get("figures") or {}).items():
        with atomic(folder / f"{name}.png") as unfinished:
            instantiate(figure).savefig(unfinished, dpi=120)
    pictures = ", ".join(sorted(path.name for path in folder.glob("*.png")))
    print(tables.get("table.md", ""), f"Tables and pictures are in {runs.relative(folder)}: {pictures}", sep="\n")


@hydra.main(config_path="configs", config_name="eval", version_base="1.3")
def main(cfg: DictConfig) -> None:
    runs.quiet_libraries()
    with runs.errors_in_one_line(), locked(runs.run_dir()):
        evaluate(cfg)


if __name__ == "__main__":
    main()
