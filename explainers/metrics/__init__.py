"""Metrics: a pure function for each formula, and a torchmetrics Metric of fixed-size sums around it."""
