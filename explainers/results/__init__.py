"""results.json: the numbers of evaluations, and the settings that they depend on."""

from explainers.results.reading import read_results

__all__ = ["read_results"]
