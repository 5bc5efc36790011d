"""Published values, shown in tables beside what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass

from explainers.errors import InputError
from explainers.results.reading import Results

Published = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Task → explainer → number → published value."""


@dataclass(frozen=True)
class Reference:
    """Published values for one target model; any number of results may have one.

    >>> paper = Reference("paper", "ViT-B", {"ViT-B": {"pets": {"TVE": {"fidelity_minus": 0.1}}}})
    >>> paper.value("pets", "TVE", "fidelity_minus"), paper.value("pets", "random", "fidelity_minus")
    (0.1, None)

    Args:
        source: the publication.
        target: the target model, one of the keys of `values`.
        values: target → task → explainer → {number: value}, in the units of results.
    """

    source: str
    target: str
    values: Mapping[str, Published]

    def __post_init__(self) -> None:
        if self.target not in self.values:
            raise InputError(
                f"expected a target that the {self.source} has values of, got {self.target}: "
                f"set reference.target to one of {', '.join(self.values)}"
            )
        for task, explainers in self.values[self.target].items():
            for name, printed in explainers.items():
                if not isinstance(printed, Mapping) or not all(isinstance(x, int | float) for x in printed.values()):
                    raise InputError(
                        f"expected numbers by their names for {name} on {task} in the reference, got {printed}: write"
                        " {fidelity_plus: 0.5, fidelity_minus: 0.1}"
                    )

    def title(self, column: str) -> str:
        """The title of the column of published values beside the measured ones, given the title of these."""
        return f"{column} {self.source}, {self.target}"

    def value(self, task: str, explainer: str, number: str) -> float | None:
        """The published value, or `None` if there is none.

        A method's row may have options, `RISE(masks=50)`, that published rows lack. They must be equal where published
        rows of this method have options, too: `ViTCX(sigma=0)`.
        """
        of_task, method = self.values[self.target].get(task, {}), explainer.partition("(")[0]
        of_any = {} if any(name.startswith(f"{method}(") for name in of_task) else of_task.get(method, {})
        return of_task.get(explainer, of_any).get(number)

    def published(self, results: Results) -> set[str]:
        """The measured numbers of which at least one row has a published value."""
        flat = [(task, name, key) for task, measured in results.items() for name in measured for key in measured[name]]
        return {key for task, name, key in flat if self.value(task, name, key) is not None}

    def missing(self, results: Results) -> str | None:
        """One line that lists the published rows if none of the results has a published value; otherwise `None`."""
        if self.published(results):
            return None
        known = [f"{', '.join(names)} on {task}" for task, names in self.values[self.target].items()]
        return (
            f"reference: the {self.source} has values of {self.target} for {'; '.join(known) or 'nothing'}, and of no"
            " number of these results (reference.target=... names another model)"
        )
