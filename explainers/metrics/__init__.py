"""Metrics: a pure function for each formula, and a torchmetrics Metric that accumulates it in fixed-size sums.

`explainers.metrics.perturbation`, `localization`, `agreement`, `confidence`, `saco` and `sanity` hold them.
"""
