"""Models as people hold them: each is found, gives its own outputs, and is explained as the table of the docs says."""

import re
from pathlib import Path

import pytest
from held import HELD, describe

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "any_model.md"
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.read_text().partition("| Model as held |")[2].splitlines()
    if line.startswith("| ") and len(cells := [cell.strip() for cell in re.split(r"\|", line)[1:-1]]) == 5
}


def test_the_table_has_every_model_and_at_least_40_rows():
    assert list(ROWS) == list(HELD) and len(ROWS) >= 40


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HELD)
def test_a_model_is_found_and_explained_as_the_table_says(name):
    found, bound, methods, auto = ROWS[name]
    row = describe(name)
    assert (row.found, row.methods, row.auto) == (found, int(methods), auto)
    assert row.difference <= 10 * float(bound) + 1e-5  # other machines round otherwise
