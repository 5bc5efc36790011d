"""Why two images are alike: which patches of one match which patches of the other, and the nearest images of many."""

from explainers.likeness.similarity import (
    Likeness,
    likeness,
    likeness_of_vectors,
    nearest,
    similar_to,
    vectors_of,
)

__all__ = ["Likeness", "likeness", "likeness_of_vectors", "nearest", "similar_to", "vectors_of"]
