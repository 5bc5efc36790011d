"""Models as people hold them: each is found, gives its own outputs, and is explained as the table of the docs says."""

from pathlib import Path

import pytest
from held import HELD, describe, family

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "any_model.md"


def read_rows():
    """Each model of the table → the other cells of its row; "timm ViT; EVA" are a "timm ViT" and a "timm EVA"."""
    rows = {}
    for line in PAGE.read_text().partition("| Models as held |")[2].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 5 or not cells[4] or cells[4].startswith("-"):
            continue
        library = family(cells[0])
        for name in cells[0].removeprefix(library).split("; "):
            rows[library + name] = cells[1:]
    return rows


ROWS = read_rows()
FIRST = {(found, auto): name for name, (found, _, _, auto) in reversed(ROWS.items())}
"""One model of each kind of row; those of other libraries are all compared in `test_conversion.py`."""

WRAPPERS = "ModelEmaV3 of timm", "AveragedModel of torch", "torch.compile"
INSIDE = "own module, ViT of transformers", "own module, DINOv2 of transformers"
"""Models that share a row with others and are found in ways of their own."""


def test_the_table_has_every_model_and_at_least_40():
    assert set(ROWS) == set(HELD) and len(ROWS) >= 40


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*FIRST.values(), *WRAPPERS, *INSIDE])
def test_a_model_is_found_and_explained_as_the_table_says(name):
    found, bound, methods, auto = ROWS[name]
    row = describe(name)
    assert (row.found, row.methods, row.auto) == (found, int(methods), auto)
    assert row.difference <= 10 * float(bound) + 1e-5  # other machines round otherwise
