"""docs/papers.md has a row for each table and figure of the papers, with a command that composes (test_readme.py)."""

import re

import pytest
from commands import ROOT

PAGE = ROOT / "docs/papers.md"
NUMBERED = {
    "TVE": {"Table": range(1, 10), "Figure": range(1, 14)},
    "SkipPLUS": {"Figure": range(1, 28)},
    "TokenTM": {"Figure": range(1, 2)},
    "ViT-CX": {"Table": range(1, 3), "Figure": range(1, 7)},
}
"""Section → kind → numbers of its tables and figures."""

OTHERS = {
    "Explainability vectors": ["ten data sets", "λ₂", "KernelSHAP", "bound", "cosine", "several vectors", "accuracy"],
    "TokenTM": ["CIFAR-10", "CIFAR-100", "ImageNet", "ImageNet-Segmentation"],
    "ViT-CX": [f"Appendix {letter}" for letter in "ABCDF"],
    "CLIP": ["the label explained", "the prediction explained", "ImageNet-Segmentation"],
}
"""Section → words of its other rows."""

STATUSES = ("measured", "runs in tests", "needs the data", "drawing")


def rows(section):
    """The cells of each row of a section's table."""
    text = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (table,) = [part for part in text if part.startswith(f"{section}\n")]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def numbers(kind, cell):
    """The numbers that a cell names: `Tables 5 and 6`, `Figures 3, 12`, `Figures 13–17`."""
    named = set()
    for part in re.findall(rf"{kind}s? ([\d–, and]+)", cell):
        for first, last in re.findall(r"(\d+)(?:–(\d+))?", part):
            named |= set(range(int(first), int(last or first) + 1))
    return named


def test_numbers_of_a_cell():
    assert numbers("Figure", "Figures 1, 3 and 13–15") == {1, 3, 13, 14, 15}
    assert numbers("Table", "Table 2, Figure 4") == {2}


@pytest.mark.parametrize(
    ("section", "kind"), [(section, kind) for section, kinds in NUMBERED.items() for kind in kinds]
)
def test_no_table_or_figure_is_missing(section, kind):
    named = set().union(*(numbers(kind, cells[0]) for cells in rows(section)))
    assert named == set(NUMBERED[section][kind])


@pytest.mark.parametrize("section", OTHERS)
def test_no_other_row_is_missing(section):
    titles = " ".join(cells[0] for cells in rows(section))
    assert [words for words in OTHERS[section] if words not in titles] == []


@pytest.mark.parametrize("section", [*NUMBERED, "Explainability vectors", "CLIP"])
def test_each_row_has_a_command_and_a_status(section):
    for title, command, status, _ in rows(section):
        stated = status.split("](")[0].strip("[")
        assert stated in STATUSES, title
        assert (stated == "measured") == ("](results/" in status), title
        assert bool(re.search(r"`(?:\w+=\S+ )*(?:python|make) [^`]+`|configs/", command)) == (stated != "drawing"), (
            title
        )
