"""Metrics: a pure function for each formula, and a torchmetrics Metric that accumulates it in fixed-size sums."""
