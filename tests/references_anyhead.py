"""AnyHead, written out with loops: scores of classes, attributions, losses and least-squares fits."""

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


def cosine_rows(weight, projection, embedding, scale):
    """scale · Pᵀ t / |P e| of every class, whose products with e are its logits: a list (K, D), of lists."""
    width = len(embedding)
    projected = [sum(row[d] * embedding[d] for d in range(width)) for row in projection]
    length = math.sqrt(sum(part**2 for part in projected))
    return [
        [scale / length * sum(t * row[d] for t, row in zip(direction, projection, strict=True)) for d in range(width)]
        for direction in weight
    ]


def heatmap(functional, vectors, side):
    """Σ_d v_d c_zd of every patch z, (rows, columns); of a list (D,) and vectors (N, D)."""
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


def unexplained(vectors, rows, head, functionals, fit):
    """The part of the squares of v · (G(x_S) − G(x_S̄)) that vectors leave, for all v = W_k, and for one v an image.

    They say that it is v · c_z summed over S, minus the same over its complement. `shapley`: c_z are shifted to sum to
    G(x) − G(x_∅), and S of k patches is drawn with 1 / √(k (N − k)), but should count with 1 / (k (N − k)).
    """
    ratios = []
    for of_image in (lambda i: list(head.double()), lambda i: [functionals[i].double()]):
        left, total = 0.0, 0.0
        for image, v in [(place, v) for place in range(len(vectors)) for v in of_image(place)]:
            shares = (vectors[image].double() @ v).tolist()
            if fit == "shapley":
                null, grand = ((rows[name][image].double() @ v).item() for name in ("blank", "embedding"))
                missing = (grand - null - sum(shares)) / len(shares)
                shares = [share + missing for share in shares]
            for difference, keep in zip(rows["difference"][image].double(), rows["keep"][image].tolist(), strict=True):
                visible = sum(share for share, seen in zip(shares, keep, strict=True) if seen)
                hidden = sum(share for share, seen in zip(shares, keep, strict=True) if not seen)
                value, weight = (difference @ v).item(), 1.0
                if fit == "shapley":
                    weight = 1 / math.sqrt(sum(keep) * (len(keep) - sum(keep)))
                left += weight * (value - (visible - hidden)) ** 2
                total += weight * value**2
        ratios.append(left / total)
    return sum(ratios) / len(ratios)


def regression(coalitions, differences, num_patches):
    """The c_z (N, D) of an ordinary least-squares fit of `differences` (M, D): added for z ∈ S, subtracted for others.

    By the normal equations, in double precision; `coalitions` are M sets.
    """
    system = torch.zeros(num_patches, num_patches, dtype=torch.double)
    wanted = torch.zeros(num_patches, differences.shape[1], dtype=torch.double)
    for coalition, difference in zip(coalitions, differences.double(), strict=True):
        signs = [1 if patch in coalition else -1 for patch in range(num_patches)]
        for patch, sign in enumerate(signs):
            system[patch] += torch.tensor([sign * other for other in signs])
            wanted[patch] += sign * difference
    return torch.linalg.solve(system, wanted)


def coalition_sizes(num_patches, power):
    """The probability of every size 0 ... N of a coalition: ∝ 1 / (k (N − k))^power, inside."""
    densities = [1 / (k * (num_patches - k)) ** power for k in range(1, num_patches)]
    return [0.0, *(density / sum(densities) for density in densities), 0.0]
