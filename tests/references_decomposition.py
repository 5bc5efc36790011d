"""Our own explainer, written out with loops: scores of classes, attributions, losses and least-squares fits."""

import math

import torch


def score_derivative(weight, logits, label, temperature):
    """∂/∂e of z_y − T log Σ_{k ≠ y} exp(z_k / T) for z = W e + b, a list (D,); of lists W (K, D) and z (K,).

    T is `None` for the logit z_y.
    """
    if temperature is None:
        return list(weight[label])
    highest = max(z for k, z in enumerate(logits) if k != label)
    odds = [0 if k == label else math.exp((z - highest) / temperature) for k, z in enumerate(logits)]
    found = []
    for d in range(len(weight[label])):
        mean = sum(odds[k] * weight[k][d] for k in range(len(weight))) / sum(odds)
        found.append(weight[label][d] - mean)
    return found


def heatmap(functional, vectors, side):
    """Σ_d v_d c_zd of every patch z, (P, P); of a list (D,) and vectors (N, D)."""
    result = torch.zeros(side, side)
    for patch, vector in enumerate(vectors.tolist()):
        result[divmod(patch, side)] = sum(v * c for v, c in zip(functional, vector, strict=True))
    return result


def squared_loss(vectors, functionals, attributions):
    """The mean over images and functionals of Σ_z (v · c_z − a_z)² / Σ_z (a_z − ā)²."""
    terms = []
    for image in range(len(vectors)):
        for v, wanted in zip(functionals[image], attributions[image].tolist(), strict=True):
            mean = sum(wanted) / len(wanted)
            errors = [(torch.dot(v, c).item() - a) ** 2 for c, a in zip(vectors[image], wanted, strict=True)]
            terms.append(sum(errors) / sum((a - mean) ** 2 for a in wanted))
    return sum(terms) / len(terms)


def unexplained(vectors, rows, head, classes, fit):
    """The part of the variance of v · G(x_S) that Σ_{z ∈ S} v · c_z does not explain, for all v = W_k, and for W_y.

    `uniform`: a regression with an intercept for each image. `shapley`: c_z are shifted to be efficient, the intercept
    is v · G(x_∅), and coalitions have weights.
    """
    ratios = []
    for of_image in (lambda i: list(head.double()), lambda i: [head[classes[i]].double()]):
        left, total = 0.0, 0.0
        for image, v in [(place, v) for place in range(len(vectors)) for v in of_image(place)]:
            values = (rows["seen"][image].double() @ v).tolist()
            shares = (vectors[image].double() @ v).tolist()
            weights, null = [1.0] * len(values), 0.0
            if fit == "shapley":
                weights = rows["weight"][image].tolist()
                null, grand = ((rows[name][image].double() @ v).item() for name in ("blank", "whole"))
                missing = (grand - null - sum(shares)) / len(shares)
                shares = [share + missing for share in shares]
            errors = []
            for value, keep in zip(values, rows["keep"][image], strict=True):
                errors.append(value - sum(share for share, seen in zip(shares, keep, strict=True) if seen))
            middle, centre = null, null
            if fit == "uniform":
                middle, centre = sum(errors) / len(errors), sum(values) / len(values)
            left += sum(w * (error - middle) ** 2 for w, error in zip(weights, errors, strict=True))
            total += sum(w * (value - centre) ** 2 for w, value in zip(weights, values, strict=True))
        ratios.append(left / total)
    return sum(ratios) / len(ratios)


def regression(coalitions, values, num_patches):
    """The slopes (N, D) of an ordinary least-squares fit of `values` (M, D) by an intercept and N indicators."""
    design = torch.zeros(len(coalitions), num_patches + 1, dtype=torch.double)
    for row, coalition in enumerate(coalitions):
        design[row, num_patches] = 1
        for patch in coalition:
            design[row, patch] = 1
    return torch.linalg.solve(design.T @ design, design.T @ values.double())[:num_patches]


def coalition_sizes(num_patches, power):
    """The probability of every size 0 ... N of a coalition: ∝ 1 / (k (N − k))^power, inside."""
    densities = [1 / (k * (num_patches - k)) ** power for k in range(1, num_patches)]
    return [0.0, *(density / sum(densities) for density in densities), 0.0]
