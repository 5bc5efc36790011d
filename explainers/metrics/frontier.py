"""The frontier of Fidelity⁺ and Fidelity⁻: they ask for two orders of the patches, and a ranking is only one."""

from collections.abc import Sequence

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
