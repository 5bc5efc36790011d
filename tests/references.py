"""The papers' definitions, written out one image, one patch and one number at a time: slow, and hard to get wrong."""

import math
from fractions import Fraction

import numpy as np
import torch


def both(sides):
    """Rows and columns, or height and width, of which one number says that both are it."""
    return (sides, sides) if isinstance(sides, int) else tuple(sides)


def window(patch, side, size):
    """The pixels of a patch as (..., rows, columns); patches are numbered row by row."""
    row, column = divmod(patch, both(side)[1])
    return ..., slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size)


def neighbourhood(patch, side, hops):
    """N(z), walking the grid: at most `hops` steps to any of the eight adjacent patches (TVE, Section 2)."""
    rows, columns = both(side)
    reached = {divmod(patch, columns)}
    for _ in range(hops):
        steps = {(row + down, column + right) for row, column in reached for down in (-1, 0, 1) for right in (-1, 0, 1)}
        reached = {(row, column) for row, column in steps if 0 <= row < rows and 0 <= column < columns}
    return {row * columns + column for row, column in reached}


def only(image, patches, side, fill=0.0):
    """A normalised image (C, H, W) of which only `patches` are visible (TVE, Section 2: Model Perturbation)."""
    seen = torch.zeros_like(image) + fill
    for patch in patches:
        where = window(patch, side, image.shape[-1] // both(side)[1])
        seen[where] = image[where]
    return seen


def meta_attribution(embed, image, side, hops):
    """g and h of every patch of one normalised image, (N, 2, D) (TVE, Equation 5)."""
    everything = set(range(math.prod(both(side))))
    seen = []
    for patch in everything:
        near = neighbourhood(patch, side, hops)
        seen += [only(image, near, side), only(image, everything - near, side)]
    return embed(torch.stack(seen)).unflatten(0, (-1, 2))


def attribution(predict, image, label, side, hops):
    """φ of every patch of one normalised image, (rows, columns): log f(N(z); y) − log f(Z \\ N(z); y) (TVE, Eq. 4)."""
    everything = set(range(math.prod(both(side))))
    heatmap = torch.zeros(both(side))
    for patch in everything:
        near = neighbourhood(patch, side, hops)
        seen, unseen = predict(torch.stack([only(image, near, side), only(image, everything - near, side)]))[:, label]
        heatmap[divmod(patch, both(side)[1])] = math.log(seen) - math.log(unseen)
    return heatmap


def tve_loss(predicted, wanted, patches):
    """Equation 7 over the patches drawn: the mean over images and patches of |ĝ − g|² + |ĥ − h|².

    `predicted` (B, N, 2, D), `wanted` (B, Z, 2, D), `patches` (B, Z).
    """
    terms = []
    for image in range(len(patches)):
        for drawn, patch in enumerate(patches[image].tolist()):
            g_error = sum(
                (predicted[image, patch, 0, d] - wanted[image, drawn, 0, d]) ** 2 for d in range(wanted.shape[-1])
            )
            h_error = sum(
                (predicted[image, patch, 1, d] - wanted[image, drawn, 1, d]) ** 2 for d in range(wanted.shape[-1])
            )
            terms.append(g_error + h_error)
    return sum(terms) / len(terms)


def pooled(heatmap, size):
    """Every patch replaced by the mean of the `size` × `size` patches around it that exist, (rows, columns)."""
    side, reach = len(heatmap), size // 2
    smooth = torch.zeros_like(heatmap)
    for row in range(side):
        for column in range(side):
            around = [
                heatmap[r, c].item()
                for r in range(row - reach, row + reach + 1)
                for c in range(column - reach, column + reach + 1)
                if 0 <= r < side and 0 <= c < side
            ]
            smooth[row, column] = sum(around) / len(around)
    return smooth


def level_size(num_patches, levels, level):
    """⌊s·N⌋ with s = level / (levels − 1), in fractions."""
    return math.floor(Fraction(level, levels - 1) * num_patches)


def top(scores, count):
    """The `count` patches of the highest scores (a list); of equal ones the earlier."""
    return set(sorted(range(len(scores)), key=lambda patch: (-scores[patch], patch))[:count])


def fidelity_curves(predict, image, scores, label, side, levels, fill=0.0):
    """Fidelity⁺ and Fidelity⁻ of one image at every sparsity, two lists (TVE, Appendix G)."""
    everything = set(range(math.prod(both(side))))
    whole = predict(image[None])[0, label].item()
    plus, minus = [], []
    for level in range(levels):
        important = top(scores.flatten().tolist(), level_size(len(everything), levels, level))
        plus.append(whole - predict(only(image, everything - important, side, fill)[None])[0, label].item())
        minus.append(whole - predict(only(image, important, side, fill)[None])[0, label].item())
    return plus, minus


def area(curve, num_patches):
    """Under a curve over the sparsities |S*| / N that were really reached, by trapezoids."""
    levels = len(curve)
    at = [level_size(num_patches, levels, level) / num_patches for level in range(levels)]
    return sum((at[i + 1] - at[i]) * (curve[i + 1] + curve[i]) / 2 for i in range(levels - 1))


def resized_crop(image, top_edge, left_edge, height, width, flipped):
    """A window of an image (C, H, W), edges in pixels, stretched to H × W by bilinear interpolation, then mirrored."""
    rows, columns = image.shape[1:]

    def between(start, length, count, i):
        """The two nearest pixels, and the weight of the second."""
        at = min(max(start + (i + 0.5) * length / count - 0.5, 0), count - 1)
        return int(at), min(int(at) + 1, count - 1), at - int(at)

    result = torch.zeros_like(image)
    for i in range(rows):
        upper, lower, down = between(top_edge, height, rows, i)
        for j in range(columns):
            left, right, across = between(left_edge, width, columns, columns - 1 - j if flipped else j)
            above = (1 - across) * image[:, upper, left] + across * image[:, upper, right]
            below = (1 - across) * image[:, lower, left] + across * image[:, lower, right]
            result[:, i, j] = (1 - down) * above + down * below
    return result


def sincos(side, width):
    """The masked autoencoder's position embeddings (1 + N, width): columns in the first half, rows in the second.

    Each half is sines, then cosines, at frequencies 10000^(−4k / width); the class token has zeros (He et al., 2022).
    """
    table = [[0.0] * width]
    for row in range(side):
        for column in range(side):
            angles = [[place * 10000 ** (-4 * k / width) for k in range(width // 4)] for place in (column, row)]
            table.append([f(angle) for half in angles for f in (math.sin, math.cos) for angle in half])
    return torch.tensor(table)


def shapley_sizes(num_patches):
    """The probability of every size 0 ... N of a coalition under the Shapley kernel: ∝ 1 / (k (N − k)), inside."""
    weights = [Fraction(1, k * (num_patches - k)) for k in range(1, num_patches)]
    return [0.0, *(float(weight / sum(weights)) for weight in weights), 0.0]


def coalition_values(predict, image, side):
    """v(S) of every coalition S of patches of one normalised image: a dictionary from frozensets to (K,)."""
    coalitions = [frozenset()]
    for patch in range(side**2):
        coalitions += [coalition | {patch} for coalition in coalitions]
    values = predict(torch.stack([only(image, coalition, side) for coalition in coalitions]))
    return dict(zip(coalitions, values, strict=True))


def exact_shapley(values, num_patches):
    """The Shapley values (N, K) of a game {coalition: v}: the mean over orders of what a patch adds when it comes."""
    phi = []
    for patch in range(num_patches):
        added = 0
        for coalition, value in values.items():
            if patch not in coalition:
                size = len(coalition)
                orders = math.factorial(size) * math.factorial(num_patches - size - 1)
                added = added + orders / math.factorial(num_patches) * (values[coalition | {patch}] - value)
        phi.append(added)
    return torch.stack(phi)


def kernel_shap(coalitions, values, null, grand, num_patches, weights=None):
    """φ (N,) of one class: the least Σ_S w(S) (v(S) − v(∅) − Σ_{z ∈ S} φ_z)² of those with Σ_z φ_z = v(all) − v(∅).

    By the condition on the Lagrangian's derivatives, in double precision; of several solutions the shortest.
    `coalitions` are sets, `values` and `weights` lists of numbers.
    """
    system = torch.zeros(num_patches + 1, num_patches + 1, dtype=torch.double)
    wanted = torch.zeros(num_patches + 1, 1, dtype=torch.double)
    for coalition, value, weight in zip(coalitions, values, weights or [1] * len(values), strict=True):
        for patch in coalition:
            wanted[patch] += 2 * weight * (value - null)
            for other in coalition:
                system[patch, other] += 2 * weight
    system[:num_patches, num_patches] = system[num_patches, :num_patches] = 1
    wanted[num_patches] = grand - null
    return torch.linalg.lstsq(system, wanted, rcond=1e-9, driver="gelsd").solution[:num_patches, 0]


def prototypes(embeddings, labels, num_classes):
    """The unit vector from the mean of all classes to the mean of each, as lists (K, D)."""
    width = len(embeddings[0])
    means = []
    for label in range(num_classes):
        own = [embeddings[i] for i in range(len(labels)) if labels[i] == label]
        means.append([sum(row[d] for row in own) / len(own) for d in range(width)])
    centre = [sum(mean[d] for mean in means) / num_classes for d in range(width)]
    away = [[mean[d] - centre[d] for d in range(width)] for mean in means]
    return [[x / math.sqrt(sum(y * y for y in row)) for x in row] for row in away]


def error_bound(predicted, exact):
    """ε, its bound and |φ̂ − φ| of one patch, from the probabilities [H(ĝ), H(ĥ)] and [H(g), H(h)] (TVE, Theorem 1)."""
    epsilon = max(abs(guess / true - 1) for guess, true in zip(predicted, exact, strict=True))
    bound = 2 * epsilon / (1 - epsilon) if epsilon < 1 else math.inf
    phi_predicted, phi = (math.log(g) - math.log(h) for g, h in (predicted, exact))
    return epsilon, bound, abs(phi_predicted - phi)


def gain(predict, image, label, near, subset, side):
    """log f(N(z) ∪ B) − log f(B) of one normalised image, for sets `near` and `subset` (TVE, Equation 2)."""
    with_near, without = (predict(only(image, patches, side)[None])[0, label] for patches in (near | subset, subset))
    return math.log(with_near) - math.log(without)


def two_points(predict, image, label, near, side):
    """The mean of what N(z) adds to everything else, and to nothing (TVE, Equation 3)."""
    rest = set(range(side**2)) - near
    return sum(gain(predict, image, label, near, subset, side) for subset in (rest, set())) / 2


def regression_with_prior(rows, gains, prior, strengths):
    """The fit δ of gains ≈ rows · δ that starts from the best multiple of a prior, by leaving one observation out.

    `rows`: M lists of N numbers that sum to 0; `strengths`: of ridge. Every fit without an observation is a new one.
    """
    x, y, prior = np.array(rows), np.array(gains), np.array(prior) - np.mean(prior)
    size = max(0, (x @ prior) @ y / ((x @ prior) @ (x @ prior)))
    rest = y - size * (x @ prior)

    def ridge(x, y, strength):
        return np.linalg.solve(x.T @ x + strength * np.eye(x.shape[1]), x.T @ y)

    errors = []
    for strength in strengths:
        left = [rest[i] - x[i] @ ridge(np.delete(x, i, 0), np.delete(rest, i), strength) for i in range(len(x))]
        errors.append(sum(error**2 for error in left))
    return size * prior + ridge(x, rest, strengths[errors.index(min(errors))])


def self_explaining_loss(logits, attributions, labels, explained, shapley, alpha):
    """α · CE + (1 − α) · MSE (explainability vectors): of logits (B, K), and of attributions (B, N, K) to one class.

    `labels`, `explained` (B,); `shapley` (B, N), of the explained class.
    """
    entropies, errors = [], []
    for image in range(len(logits)):
        scores = logits[image].tolist()
        entropies.append(math.log(sum(math.exp(score) for score in scores)) - scores[labels[image]])
        for patch in range(shapley.shape[1]):
            attribution = attributions[image, patch, explained[image]].item()
            errors.append((attribution - shapley[image, patch].item()) ** 2)
    return alpha * sum(entropies) / len(entropies) + (1 - alpha) * sum(errors) / len(errors)
