"""Localization, written out one image, one threshold and one pixel at a time (see `references`)."""

import math
from fractions import Fraction
from itertools import pairwise

from references_masks import bilinear


def hit(heatmap, truth):
    """The probability that a patch of the highest score, drawn at random, has its centre on the object."""
    (rows, columns), (height, width) = heatmap.shape, truth.shape
    highest, landed = max(heatmap.flatten().tolist()), []
    for row in range(rows):
        for column in range(columns):
            if heatmap[row, column] == highest:
                centre = int((row + 0.5) * height / rows), int((column + 0.5) * width / columns)
                landed.append(truth[centre].item())
    return sum(landed) / len(landed)


def nearest(heatmap, height, width):
    """The score of every pixel, which is that of its patch, in a list."""
    rows, columns = heatmap.shape
    return [heatmap[i * rows // height, j * columns // width].item() for i in range(height) for j in range(width)]


def average_precision(scores, labels):
    """Precision at every threshold, weighted by the recall that the threshold adds; of two lists."""
    total, recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = [label for score, label in zip(scores, labels, strict=True) if score >= threshold]
        total += (sum(chosen) / sum(labels) - recall) * sum(chosen) / len(chosen)
        recall = sum(chosen) / sum(labels)
    return total


def scaled(heatmap, size):
    """Res of Chefer et al., as fractions in a list of the pixels of `size`: 1/2 if all scores are equal.

    It is exact, as patches of 2, 4, 8 ... pixels have exact weights.
    """
    pixels = [Fraction(pixel) for pixel in bilinear(heatmap.double(), size).flatten().tolist()]
    low, high = min(pixels), max(pixels)
    return [(pixel - low) / (high - low) if high > low else Fraction(1, 2) for pixel in pixels]


def segmented(heatmap, truth):
    """Correct pixels, (intersection, union) of background and of object, and average precision, of one image."""
    pixels, labels = scaled(heatmap, truth.shape), truth.flatten().tolist()
    predicted = [pixel > sum(pixels) / len(pixels) for pixel in pixels]
    correct, areas = 0, []
    for kind in (False, True):
        both = sum(p == kind and label == kind for p, label in zip(predicted, labels, strict=True))
        either = sum(p == kind or label == kind for p, label in zip(predicted, labels, strict=True))
        areas.append((both, either))
        correct += both
    planes = [1 - pixel for pixel in pixels] + pixels
    rank = {score: number for number, score in enumerate(sorted(set(planes)))}  # integers are compared faster
    return correct, areas, average_precision([rank[s] for s in planes], [not label for label in labels] + labels)


def mean_iou(areas):
    """mIoU and its standard error, of (intersection, union) of both kinds in every image: those of a ratio of sums."""
    ratios = []
    for kind in (0, 1):
        ratios.append(sum(image[kind][0] for image in areas) / sum(image[kind][1] for image in areas))
    squares = 0.0
    for image in areas:
        residual = 0.0
        for kind in (0, 1):
            both, either = image[kind]
            residual += (both - ratios[kind] * either) / sum(other[kind][1] for other in areas) / 2
        squares += residual**2
    return sum(ratios) / 2, (squares * len(areas) / (len(areas) - 1)) ** 0.5


def components(pixels):
    """The connected sets of (row, column) of a set, found by visiting neighbours, corners included."""
    rest, found = set(pixels), []
    while rest:
        queue = [rest.pop()]
        region = set(queue)
        while queue:
            row, column = queue.pop()
            near = {(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & rest
            rest -= near
            region |= near
            queue += near
        found.append(region)
    return found


def box_hit(heatmap, truth, threshold):
    """Whether a box of the object and the box around the largest region from the threshold on overlap by half."""

    def filled(region):
        rows, columns = [row for row, _ in region], [column for _, column in region]
        return {(i, j) for i in range(min(rows), max(rows) + 1) for j in range(min(columns), max(columns) + 1)}

    scores = scaled(heatmap, truth.shape)
    hot = {divmod(i, truth.shape[1]) for i, score in enumerate(scores) if score >= Fraction(threshold)}
    box = filled(max(components(hot), key=lambda region: (len(region), [-place for place in min(region)])))
    objects = [filled(region) for region in components(map(tuple, truth.nonzero().tolist()))]
    return any(2 * len(box & each) >= len(box | each) for each in objects)


def filled(corners, rows, columns):
    """COCO's polygon: a pixel is inside if an odd number of crossings of its column lie in rows up to its own."""
    crossings = []  # (column, first row after it)
    points = []
    ends = [(int(5 * x + 0.5), int(5 * y + 0.5)) for x, y in corners]
    for (x0, y0), (x1, y1) in zip(ends, ends[1:] + ends[:1], strict=True):
        flat = abs(x1 - x0) >= abs(y1 - y0)
        low, high = sorted([(x0, y0), (x1, y1)], key=lambda point: point[0 if flat else 1])
        edge = []
        for step in range(max(abs(x1 - x0), abs(y1 - y0)) + 1):
            if flat:
                slope = (high[1] - low[1]) / max(high[0] - low[0], 1)
                edge.append((low[0] + step, int(low[1] + slope * step + 0.5)))
            else:
                slope = (high[0] - low[0]) / max(high[1] - low[1], 1)
                edge.append((int(low[0] + slope * step + 0.5), low[1] + step))
        points += edge if low == (x0, y0) else edge[::-1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 != x1 and min(x0, x1) % 5 == 2:  # the middle of a column of pixels
            crossings.append((min(x0, x1) // 5, math.ceil((min(y0, y1) - 2) / 5)))
    return [[sum(c == x and r <= y for c, r in crossings) % 2 for x in range(columns)] for y in range(rows)]
