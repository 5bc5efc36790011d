"""Explain and measure: every explainer on every task of one backbone. `python eval.py experiment=quickstart_eval`."""

import json

import hydra
from hydra.utils import instantiate
from lightning import seed_everything
from omegaconf import DictConfig

from explainers import report, runs


def evaluate(cfg: DictConfig) -> None:
    """Write `results.json` and `.csv`, `table.md`, `curves.png` and heatmaps of every task to the folder of the run."""
    folder = runs.run_dir()
    data = {task: instantiate(settings.data) for task, settings in cfg.tasks.items()}
    for images in data.values():
        images.setup("test")  # missing images of the last task show before the first one is measured
    if runs.launch(runs.number_of_processes(cfg.trainer)):
        return
    runs.start_record(cfg, folder, go_on=True)
    results, identity = {}, {}
    for task, settings in cfg.tasks.items():
        seed_everything(cfg.seed, workers=True)  # of every task by itself, whichever came before
        target = instantiate(cfg.target, head=settings.head)
        explainers = {
            name: instantiate(node, **({"target": target} if "target" in node else {}))
            for name, node in cfg.explainers.items()
        }
        evaluation = instantiate(cfg.evaluation, target=target, explainers=explainers)
        heatmaps = instantiate(cfg.heatmaps, name=task)
        trainer = instantiate(cfg.trainer, callbacks=[heatmaps], logger=runs.build_all(cfg.logger))
        trainer.test(evaluation, data[task], verbose=False)
        results[task], identity[task] = evaluation.results, evaluation.identity()
        runs.write_atomically(folder / "results.json", json.dumps({"results": results, "identity": identity}, indent=2))
    if trainer.is_global_zero:
        runs.write_atomically(folder / "results.csv", report.comma_separated(results))
        runs.write_atomically(folder / "table.md", report.markdown(results))
        report.draw_curves(results, folder / "curves.png")
        print(report.markdown(results), f"Everything is in {folder}", sep="\n")


@hydra.main(config_path="configs", config_name="eval", version_base="1.3")
def main(cfg: DictConfig) -> None:
    with runs.errors_in_one_line():
        evaluate(cfg)


if __name__ == "__main__":
    main()
