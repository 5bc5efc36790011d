"""Metrics of faithfulness on groups and subsets of patches, written out one image and one number at a time."""

import math


def salience_groups(scores, count):
    """Sets of equally many patches, the most salient first; leftover patches lie between the groups.

    For scores without ties. Group i of 0 ... K − 1 starts where a K − 1'th part of the leftover patches is skipped i
    times, rounded down.
    """
    ranking = sorted(range(len(scores)), key=lambda patch: -scores[patch])
    size = len(scores) // count
    starts = [math.floor(i * (len(scores) - size) / (count - 1)) for i in range(count)]
    return [set(ranking[start : start + size]) for start in starts]


def saco(drops, saliences):
    """F of one image, from groups in descending order of salience (SaCo, Algorithm 1)."""
    coefficient, total = 0, 0
    for i in range(len(drops) - 1):
        for j in range(i + 1, len(drops)):
            weight = saliences[i] - saliences[j]
            if drops[i] < drops[j]:
                weight = -weight
            coefficient += weight
            total += abs(weight)
    return coefficient / total


def max_sensitivity(explain, image, label, noisy, heatmap):
    """The largest change of one image's heatmap in any of its noisy versions, divided by the length of the heatmap."""

    def norm(values):
        return math.sqrt(sum(value**2 for value in values))

    clean = heatmap.flatten().tolist()
    changes = []
    for version in noisy:
        other = explain(version[None], label[None])[0].flatten().tolist()
        changes.append(norm([a - b for a, b in zip(other, clean, strict=True)]))
    return max(changes) / norm(clean)


def chefer(correct, scores, negative):
    """The area of Chefer et al. (2021) of one image, as the authors compute it: np.trapz from 0 to 90 % of the pixels.

    Args:
        correct: a set of black pixels → whether the model still predicts the label.
        scores: importance of each pixel, without ties.
        negative: whether the least important pixels become black first.
    """
    ranking = sorted(range(len(scores)), key=lambda pixel: scores[pixel] if negative else -scores[pixel])
    steps = [step / 10 for step in range(10)]
    values = [float(correct(set(ranking[: round(step * len(scores))]))) for step in steps]
    return sum((values[i] + values[i + 1]) / 2 * (steps[i + 1] - steps[i]) for i in range(len(steps) - 1))


def grad_eclip(rank, scores, top, inserted, until):
    """The accuracy of Grad-ECLIP of one image at 11 levels, and its area without an image of black pixels alone.

    Args:
        rank: a set of visible pixels → number of classes with a higher logit than the label.
        scores: importance of each pixel, without ties.
        top: k; the label must be among the k highest logits.
        inserted: whether the most important pixels enter a black image, or leave the whole one.
        until: the share of pixels that are moved at the last level.
    """
    ranking = sorted(range(len(scores)), key=lambda pixel: -scores[pixel])
    values = []
    for step in range(11):
        moved = set(ranking[: round(step * until * len(scores) / 10)])
        visible = moved if inserted else set(ranking) - moved
        values.append(float(rank(visible) < top))
    area = 0
    for step in range(1 if inserted else 0, 10):
        area += (values[step] + values[step + 1]) / 2 * until / 10
    return area, values
