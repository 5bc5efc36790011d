"""Explain and measure: every explainer on every task of one backbone. `python eval.py experiment=quickstart_eval`."""

import hydra
from hydra.utils import instantiate
from lightning import seed_everything
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from explainers import report, runs
from explainers.results import ResultsFile


def evaluate(cfg: DictConfig) -> None:
    """Write `results.json`, tables, figures, and heatmaps of every task to the folder of the run."""
    folder = runs.run_dir()
    resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    file = ResultsFile(folder / "results.json", resolved, cfg.fresh)
    tasks = {task: settings for task, settings in cfg.tasks.items() if task not in file.kept}
    data = {task: instantiate(settings.data) for task, settings in tasks.items()}
    for images in data.values():
        images.setup("test")  # missing images of the last task show before the first one is measured
    if runs.launch(runs.number_of_processes(cfg.trainer)):
        return
    runs.start_record(cfg, folder, go_on=True)
    file.tell()
    for task, settings in tasks.items():
        seed_everything(cfg.seed, workers=True)  # of every task by itself, whichever came before
        target = instantiate(cfg.target, head=settings.head)
        nodes = OmegaConf.merge(cfg.explainers, settings.get("explainers") or {})
        explainers = {
            name: instantiate(node, **({"target": target} if "target" in node else {})) for name, node in nodes.items()
        }
        evaluation = instantiate(cfg.evaluation, target=target, explainers=explainers)
        heatmaps = instantiate(cfg.heatmaps, name=task)
        trainer = instantiate(cfg.trainer, callbacks=[heatmaps], logger=runs.build_all(cfg.logger))
        trainer.test(evaluation, data[task], verbose=False)
        file.add(task, evaluation.results, evaluation.identity())
    publish(cfg)


@rank_zero_only
def publish(cfg: DictConfig) -> None:
    """Tables and figures, of what stands in files alone."""
    folder, tables = runs.run_dir(), report.tables(instantiate(cfg.results), instantiate(cfg.get("reference")))
    for name, text in tables.items():
        runs.write_atomically(folder / name, text)
    for name, figure in (cfg.get("figures") or {}).items():
        instantiate(figure).savefig(folder / f"{name}.png", dpi=120)
    print(tables.get("table.md", ""), f"Everything is in {folder}", sep="\n")


@hydra.main(config_path="configs", config_name="eval", version_base="1.3")
def main(cfg: DictConfig) -> None:
    with runs.errors_in_one_line():
        evaluate(cfg)


if __name__ == "__main__":
    main()
