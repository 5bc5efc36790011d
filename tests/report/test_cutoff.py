"""The figure of the first layer that PLUS sums."""

import pytest

from benchmarks.papers.cutoff import cutoff_curves
from explainers.errors import InputError


def measured(insertion, **others):
    return {"insertion_accuracy": insertion, "insertion_accuracy_error": 0.1, "average_precision": 0.5, **others}


RESULTS = {
    "photos": {
        "chance": {"insertion_accuracy": 0.1},
        **{f"DecompX-PLUS(start={start})": measured(0.5 + start / 10, deletion=0.2) for start in (2, 0, 10, 5)},
        **{f"AttIxG-PLUS(next_input=False, start={start})": measured(0.3) for start in (0, 5)},
    }
}


def test_a_line_of_each_method_goes_through_its_first_layers_in_order():
    upper, lower = cutoff_curves(RESULTS).axes
    assert [axis.get_ylabel() for axis in (upper, lower)] == ["Insertion accuracy ↑", "AP ↑"]  # those that all have
    lines = {container.get_label(): container.lines[0].get_xydata().tolist() for container in upper.containers}
    assert lines == {
        "DecompX-PLUS": [[0, 0.5], [2, 0.7], [5, 1.0], [10, 1.5]],
        "AttIxG-PLUS(next_input=False)": [[0, 0.3], [5, 0.3]],
    }


@pytest.mark.parametrize(("layers", "middle"), [(None, 6), (24, 12), (27, 14)])
def test_plus_and_skipplus_are_marked(layers, middle):
    """SkipPLUS, Equation 4: m = ⌈L / 2⌉; of 11 layers up to the last first layer, 10, it is 6."""
    figure = cutoff_curves(RESULTS, layers)
    assert [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_linestyle() == ":"] == [0, middle]


def test_without_first_layers_the_way_to_measure_some_is_told():
    with pytest.raises(InputError, match="got GAE: measure methods=.*start:"):
        cutoff_curves({"photos": {"GAE": measured(0.1)}})
