"""The recipes of docs/papers.yaml: what they say of our commands is what the configs have, and the page shows them."""

import importlib.util

import pytest
from commands import ROOT, composed
from omegaconf import OmegaConf

DOCS = OmegaConf.to_container(OmegaConf.load(ROOT / "docs/papers.yaml"))
RECIPES = {name: rows for recipes in DOCS["Recipes"].values() for name, rows in recipes.items()}


@pytest.mark.parametrize("experiment", RECIPES)
def test_a_recipe_says_what_the_config_of_its_experiment_has(experiment, tmp_path):
    config = "eval" if experiment.startswith("papers/") else "train"
    cfg = composed(f"experiment={experiment}", folder=tmp_path, config=config)
    for row in RECIPES[experiment]:
        if "key" not in row:
            continue
        found = OmegaConf.select(cfg, row["key"])
        said = row.get("value", row.get("ours", row["paper"]))
        if isinstance(said, int | float) and not isinstance(said, bool):
            assert found == pytest.approx(said), row
        else:
            found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
            names = str(found), str(found).rpartition(".")[2] if row["key"].endswith("_target_") else None
            assert str(said) in names, (row, found)


def test_the_page_shows_the_recipes():
    spec = importlib.util.spec_from_file_location("papers", ROOT / "docs/papers.py")
    papers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(papers)
    page = (ROOT / "docs/papers.md").read_text()
    assert papers.draw_page(page, DOCS["Recipes"]) == page, "run python docs/papers.py"
    assert all(f"<!-- recipes: {paper} -->\nAs in the paper: " in page for paper in DOCS["Recipes"])
    changed = {paper: {"x": [{"setting": "s", "paper": 1, "ours": 2}]} for paper in DOCS["Recipes"]}
    assert papers.draw_page(page, changed).count("| s | 1 | 2 | = |") == len(changed)
