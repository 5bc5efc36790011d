"""Refinement by masked passes: one strength after the other, with matrices that are inverted as they stand."""

import math

import numpy as np


def design(keep, prior):
    """How each pair depends on β and α, and on δ. `keep`: M lists of N booleans; `prior`: N numbers."""
    shape = [value - sum(prior) / len(prior) for value in prior]
    free, rows = [], []
    for mask in keep:
        signs = [1 if seen else -1 for seen in mask]
        free.append([sum(signs), sum(sign * value for sign, value in zip(signs, shape, strict=True))])
        rows.append([sign - sum(signs) / len(signs) for sign in signs])
    return np.array(free, float), np.array(rows, float)


def merged(keep, observed):
    """Different masks, one of each and its complement; the means that they observe; how often each was drawn."""
    means = {}
    for mask, value in zip(keep, observed, strict=True):
        other = tuple(not seen for seen in mask)
        known = other in means
        means.setdefault(other if known else tuple(mask), []).append(-value if known else value)
    counts = np.array([len(values) for values in means.values()])
    return list(means), np.array([sum(values) / len(values) for values in means.values()]), counts


def for_strength(free, rows, observed, strength):
    """α, δ, the evidence, and parts of standard errors, for observed ~ N(free · b, variance · (1 + rows rowsᵀ / λ)).

    `free` has the column of β, and that of α unless there is no prior. Everything is inverted as it stands.
    """
    count, patches = rows.shape
    precision = np.linalg.inv(np.eye(count) + rows @ rows.T / strength)
    b = np.linalg.solve(free.T @ precision @ free, free.T @ precision @ observed)
    if len(b) == 2 and b[1] < 0:  # α ≥ 0
        b = np.array([free[:, 0] @ precision @ observed / (free[:, 0] @ precision @ free[:, 0]), 0])
    wrong = observed - free @ b
    squares, left = wrong @ precision @ wrong, count - len(b)
    logs = [np.linalg.slogdet(each)[1] for each in (precision, free.T @ precision @ free)]
    evidence = 0.5 * (logs[0] - logs[1] - left * math.log(squares))
    both = np.hstack([free, rows])
    penalty = strength * np.diag([0] * len(b) + [1] * patches)
    covariance = np.linalg.inv(both.T @ both + penalty)
    variance = squares / (0.4 if left == 2 else left - 2)
    return b, rows.T @ precision @ wrong / strength, evidence, variance, covariance, both @ covariance @ both.T


def refined(keep, observed, prior, relative_strengths, belief):
    """Attributions and standard errors of N patches, of M pairs of one image."""
    keep, observed, times = merged(keep, observed)
    free, rows = (each * np.sqrt(times)[:, None] for each in design(keep, prior))
    observed = observed * np.sqrt(times)
    count, patches = rows.shape
    if np.linalg.lstsq(free, observed, rcond=None)[0][1] <= 0:
        free = free[:, :1]
    used = free.shape[1] == 2
    shape = (np.array(prior) - np.mean(prior)) * used
    one = free[:, :1] / np.linalg.norm(free[:, 0])
    beside = rows - one @ (one.T @ rows)
    centre = np.eye(patches) - 1 / patches
    found = []
    for relative in relative_strengths:
        strength = patches * relative
        b, delta, evidence, variance, covariance, hat = for_strength(free, rows, observed, strength)
        log_belief = belief[0] * math.log(1 / (1 + relative)) + belief[1] * math.log(relative / (1 + relative))
        to_patches = np.hstack([np.zeros((patches, 1)), *([shape[:, None]] if used else []), np.eye(patches)])
        influence = np.linalg.inv(beside.T @ beside + strength * np.eye(patches)) @ beside.T
        posterior = np.diag(centre @ to_patches @ covariance @ to_patches.T @ centre)
        unknown = variance * (posterior - (influence**2).sum(1))
        values = (b[1] if used else 0) * shape + delta
        found.append((math.exp(evidence + log_belief), values, unknown, influence, hat, free @ b + rows @ delta))
    total = sum(each[0] for each in found)
    share = [each[0] / total for each in found]
    mean = [sum(p * each[i] for p, each in zip(share, found, strict=True)) for i in range(1, 6)]
    between = sum(p * (each[1] - mean[0]) ** 2 for p, each in zip(share, found, strict=True))
    left = count - free.shape[1]
    of_pairs = (observed - mean[4]) ** 2 / (1 - np.diag(mean[3])) * left / (0.4 if left == 2 else left - 2)
    even = free[:, 0] @ (observed - rows @ mean[0]) / (free[:, 0] @ free[:, 0])
    return mean[0] + even, np.sqrt(mean[1] + between + mean[2] ** 2 @ of_pairs)
