"""Evaluation of a run: the evaluator, the prediction cache, calibration, out-of-distribution detection, robustness.

Metrics are plug-ins in `evaluation.metrics`. Sharpness and curvature belong in `loss_landscape`."""
