"""Paired comparisons, written out one image and one pair at a time (see `references`)."""

import math


def difference(one, other):
    """Mean, standard error and number of the differences of the images that both have."""
    differences = [a - b for a, b in zip(one, other, strict=True) if not math.isnan(a) and not math.isnan(b)]
    count = len(differences)
    mean = sum(differences) / count
    variance = sum((each - mean) ** 2 for each in differences) / (count - 1)
    return mean, math.sqrt(variance / count), count


def holm(p):
    """Accept from the smallest p-value on; the first of m remaining hypotheses is tested at level / m."""
    corrected, largest = [math.nan] * len(p), 0.0
    left = sorted((value, place) for place, value in enumerate(p))
    while left:
        value, place = left[0]
        largest = max(largest, min(1.0, value * len(left)))
        corrected[place] = largest
        left = left[1:]
    return corrected
