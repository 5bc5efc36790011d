"""The frontier of Fidelity⁺ and Fidelity⁻: they ask for two orders of the patches, and a ranking is only one."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from explainers.errors import InputError
from explainers.report.figures import SIDES, require
from explainers.report.labels import choose_colours, legend_below, make_title, names_in
from explainers.results.reading import Results

Point = tuple[float, float]
"""Fidelity⁺ and Fidelity⁻ of a ranking of the patches, or of a pair of orders, one for each."""


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats or equals in both fidelities, by ascending Fidelity⁻ and Fidelity⁺.

    Its ends are the lowest Fidelity⁻, of the order that removes the least relevant patches first (LeRF of TRACE, Wang &
    Wang, 2024), and the highest Fidelity⁺, of the order that removes the most relevant first (MoRF).

    >>> frontier([(0.6, 0.1), (0.7, 0.2), (0.5, 0.15), (0.7, 0.3)])
    [(0.6, 0.1), (0.7, 0.2)]
    """
    best: list[Point] = []
    for plus, minus in sorted(points, key=lambda point: (point[1], -point[0])):
        if not best or plus > best[-1][0]:
            best.append((plus, minus))
    return best


def frontier_area(points: Sequence[Point], chance: Point) -> float:
    """The area of all pairs of fidelities that are worse than a point, and better than chance (c⁺, c⁻) in both.

    It is the area of the union of the rectangles [c⁺, F⁺] × [F⁻, c⁻], the hypervolume indicator of Zitzler & Thiele
    (1998). One ranking has (F⁺ − c⁺) · (c⁻ − F⁻), or 0 if it is not better than chance in both. An explainer with two
    orders has that of the point of F⁺ of its high order and F⁻ of its low order.

    >>> round(frontier_area([(0.6, 0.1)], chance=(0.3, 0.3)), 6), frontier_area([(0.2, 0.1)], chance=(0.3, 0.3))
    (0.06, 0.0)
    >>> round(frontier_area([(0.6, 0.1), (0.7, 0.2)], chance=(0.3, 0.3)), 6)
    0.07
    """
    area, reached = 0.0, chance[0]
    for plus, minus in frontier([(plus, minus) for plus, minus in points if plus > chance[0] and minus < chance[1]]):
        area += (plus - reached) * (chance[1] - minus)
        reached = plus
    return area


def fidelity_frontier(results: Results) -> Figure:
    """Fidelity⁺ against Fidelity⁻: one column per task, one point per explainer, and their frontier as a step line.

    The number behind a task is the `frontier_area` of all its explainers. Beside it stand that of the best single one,
    and that of the star: the highest Fidelity⁺ and the lowest Fidelity⁻, which two different orders reach.

    Raises:
        InputError: if `chance` was not measured on a task.
    """
    require(results, *SIDES)
    missing = [task for task, explainers in results.items() if "chance" not in explainers]
    if missing:
        raise InputError(f"figures=[frontier]: expected chance on {', '.join(missing)}: measure explainers=[chance]")
    figure = Figure(figsize=(1 + 3.6 * len(results), 4), layout="constrained")
    colours = choose_colours(names_in(results))
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for axis, (task, explainers) in zip(axes, results.items(), strict=True):
        points = {name: (numbers["fidelity_plus"], numbers["fidelity_minus"]) for name, numbers in explainers.items()}
        for name, (plus, minus) in points.items():
            axis.plot(minus, plus, "o", color=colours[name], label=make_title(name))
        best, chance = frontier(list(points.values())), points["chance"]
        corner = best[-1][0], best[0][1]
        axis.step([minus for _, minus in best], [plus for plus, _ in best], where="post", color="grey", zorder=0)
        axis.plot(corner[1], corner[0], "*", color="black", label="two orders")
        single = max(frontier_area([point], chance) for point in points.values())
        all_of_them, both = frontier_area(best, chance), frontier_area([corner], chance)
        axis.set_title(f"{task}: {all_of_them:.3f}\none {single:.3f}, two orders {both:.3f}")
        axis.set(xlabel=SIDES["fidelity_minus"], ylabel=SIDES["fidelity_plus"])
        axis.grid(alpha=0.3)
    legend_below(figure, axes)
    return figure
