"""docs/papers.yaml has a line for each table and figure of the papers; docs/papers.md says the same in short."""

import re

import pytest
import yaml
from commands import ROOT

ROWS = yaml.safe_load((ROOT / "docs/papers.yaml").read_text())
PAGE = (ROOT / "docs/papers.md").read_text()
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


def numbers(kind, text):
    """The numbers that a text names: `Tables 5 and 6`, `Figures 3, 12`, `Figures 13–17`."""
    named = set()
    for part in re.findall(rf"{kind}s? ((?:\d|–|, | and )+)", text):
        for first, last in re.findall(r"(\d+)(?:–(\d+))?", part):
            named |= set(range(int(first), int(last or first) + 1))
    return named


@pytest.mark.parametrize(
    ("section", "kind"), [(section, kind) for section, kinds in NUMBERED.items() for kind in kinds]
)
def test_no_table_or_figure_is_missing_and_the_page_gives_each_the_status_of_its_row(section, kind):
    named = set().union(*(numbers(kind, row["what"]) for row in ROWS[section]))
    assert named == set(NUMBERED[section][kind])
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    for status in STATUSES:
        rows = set().union(*(numbers(kind, row["what"]) for row in ROWS[section] if row["status"] == status))
        lines = re.findall(rf"^- {status}: (.*(?:\n  .*)*)", text, re.MULTILINE)
        assert numbers(kind, "".join(lines)) <= rows, status
        named -= numbers(kind, "".join(lines))
    assert named == set()


@pytest.mark.parametrize("section", OTHERS)
def test_no_other_row_is_missing(section):
    titles = " ".join(row["what"] for row in ROWS[section])
    assert [words for words in OTHERS[section] if words not in titles] == []


@pytest.mark.parametrize("section", ROWS)
def test_each_row_has_commands_and_a_status(section):
    for row in ROWS[section]:
        assert row["status"] in STATUSES, row
        assert (row["status"] == "measured") == ("where" in row), row
        assert bool(row.get("commands")) == (row["status"] != "drawing"), row
        file, _, anchor = row.get("where", "").partition("#")
        page = (ROOT / "docs" / file).read_text() if file else PAGE
        headings = {
            re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in re.findall("^#+ (.*)", page, re.M)
        }
        assert anchor in headings | {""}, row
