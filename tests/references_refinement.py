"""Refinement by masked passes, with loops: every fit without an observation is a new one."""

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


def penalised(free, rows, observed, strength):
    """Least squares of observed ≈ free · b + rows · δ with the penalty strength · |δ|², as one larger problem."""
    count = rows.shape[1]
    above = np.hstack([free, rows])
    below = np.hstack([np.zeros((count, free.shape[1])), math.sqrt(strength) * np.eye(count)])
    solution = np.linalg.lstsq(np.vstack([above, below]), np.concatenate([observed, np.zeros(count)]), rcond=None)[0]
    return solution[: free.shape[1]], solution[free.shape[1] :]


def left_out(free, rows, observed, strength):
    """Error of each pair in a fit to all other pairs."""
    errors = []
    for pair in range(len(observed)):
        b, delta = penalised(np.delete(free, pair, 0), np.delete(rows, pair, 0), np.delete(observed, pair), strength)
        errors.append(observed[pair] - free[pair] @ b - rows[pair] @ delta)
    return errors


def refined(keep, observed, prior, strengths):
    """Attributions and standard errors of N patches, of M pairs of one image."""
    observed = np.array(observed)
    free, rows = design(keep, prior)
    plain = np.linalg.lstsq(free, observed, rcond=None)[0]
    if plain[1] <= 0:
        free = free[:, :1]
    sums = [sum(error**2 for error in left_out(free, rows, observed, strength)) for strength in strengths]
    strength = strengths[sums.index(min(sums))]
    b, delta = penalised(free, rows, observed, strength)
    shape = np.array(prior) - np.mean(prior)
    values = b[0] + (max(0, b[1]) * shape if len(b) == 2 else 0) + delta
    residuals = observed - free @ b - rows @ delta
    variance = np.mean([r * e for r, e in zip(residuals, left_out(free, rows, observed, strength), strict=True)])
    sizes = free[:, :1] / np.linalg.norm(free[:, 0])
    seen = rows - sizes @ (sizes.T @ rows)
    centre = np.eye(len(prior)) - 1 / len(prior)
    covariance = variance * centre @ np.linalg.inv(seen.T @ seen + strength * np.eye(len(prior))) @ centre
    return values, np.sqrt(np.diag(covariance))
