"""The frontier of both fidelities: its area against a count of cells, and what its figure shows."""

import pytest
import torch

from explainers.errors import InputError
from explainers.report.frontier import fidelity_frontier, frontier, frontier_area


def slow_area(points, chance, cells=50):
    """The share of the cells of a square, on whose lattice all numbers lie, that lie between a point and chance."""
    inside = 0
    for i in range(cells):
        for j in range(cells):
            plus, minus = (i + 0.5) / cells, (j + 0.5) / cells
            better = plus > chance[0] and minus < chance[1]
            inside += better and any(plus < point[0] and minus > point[1] for point in points)
    return inside / cells**2


def test_the_area_is_that_of_a_count_of_cells():
    for _ in range(20):
        points = [(a / 50, b / 50) for a, b in torch.randint(0, 51, (6, 2)).tolist()]
        assert frontier_area(points, (0.3, 0.7)) == pytest.approx(slow_area(points, (0.3, 0.7)))
        kept = frontier(points)
        assert frontier_area(kept, (0.3, 0.7)) == pytest.approx(frontier_area(points, (0.3, 0.7)))
        assert kept[0][1] == min(minus for _, minus in points) and kept[-1][0] == max(plus for plus, _ in points)
        assert kept == sorted(kept) and len(set(kept)) == len(kept)


def test_the_figure_shows_explainers_their_frontier_and_its_areas():
    values = {"chance": (0.3, 0.3), "low": (0.5, 0.1), "high": (0.7, 0.2), "worse": (0.5, 0.25)}
    rows = {name: {"fidelity_plus": plus, "fidelity_minus": minus} for name, (plus, minus) in values.items()}
    axis, other = fidelity_frontier({"photos": rows, "chance alone": {"chance": rows["chance"]}}).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
    assert drawn["low"] == [[0.1, 0.5]] and drawn["two orders"] == [[0.1, 0.7]] and len(drawn) == 6
    assert [[0.1, 0.5], [0.2, 0.7]] in drawn.values()
    assert axis.get_title() == "photos: 0.060\none 0.040, two orders 0.080"
    assert other.get_title() == "chance alone: 0.000\none 0.000, two orders 0.000"
    with pytest.raises(InputError, match="^figures=.frontier.: expected chance on photos: measure explainers=.chance."):
        fidelity_frontier({"photos": {"low": rows["low"]}})
