"""Draws the recipes of papers.yaml, what the papers' tables were made with, into papers.md: python docs/papers.py."""

import re
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent


def draw(recipes: dict[str, list[dict[str, str]]]) -> str:
    """The recipes of a paper, experiment → settings: a line of those that are the same, and a table of the others."""
    rows = [row for settings in recipes.values() for row in settings]
    differs = [row for row in rows if {"ours", "measured"} & row.keys()]
    same = "; ".join(f"{row['setting']} ({row['paper']})" for row in rows if row not in differs)
    lines = [f"As in the paper: {same}.", "", "| Setting | Paper | Our command | Below |", "|---|---|---|---|"]
    cells = [(row["setting"], row["paper"], row.get("ours", "="), row.get("measured", "=")) for row in differs]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in cells)])


def draw_page(page: str, recipes: dict[str, dict[str, list[dict[str, str]]]]) -> str:
    """A page whose drawn parts, each between two comments, are drawn anew."""

    def drawn(part: re.Match[str]) -> str:
        return f"{part[1]}\n{draw(recipes[part[2]])}\n{part[3]}"

    return re.sub(r"(<!-- recipes: ([^>]+) -->)\n.*?(<!-- end -->)", drawn, page, flags=re.DOTALL)


if __name__ == "__main__":
    file = FOLDER / "papers.md"
    recipes = yaml.safe_load((FOLDER / "papers.yaml").read_text(encoding="utf-8"))["Recipes"]
    file.write_text(draw_page(file.read_text(encoding="utf-8"), recipes), encoding="utf-8")
