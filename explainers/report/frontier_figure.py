"""The figure of both fidelities against each other."""

from matplotlib.figure import Figure

from explainers.errors import InputError
from explainers.metrics.frontier import frontier, frontier_area
from explainers.report.figures import SIDES, require
from explainers.report.labels import choose_colours, legend_below, make_title, names_in
from explainers.results.reading import Results


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
