"""Statistics on plain numbers and tensors: estimates with errors, confidence intervals, and rank statistics.

Metrics themselves belong in `evaluation.metrics`."""
