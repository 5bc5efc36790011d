"""Why two images are alike: which patches of one match which patches of the other, and the nearest images of many."""

from explainers.likeness.pairs import Likeness, likeness
from explainers.likeness.similarity import nearest, similar_to
from explainers.likeness.vectors import vectors_of

__all__ = ["Likeness", "likeness", "nearest", "similar_to", "vectors_of"]
