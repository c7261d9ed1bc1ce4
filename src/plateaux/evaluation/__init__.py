"""Evaluation of a run: the evaluator, the prediction cache, out-of-distribution detection, robustness.

Metrics are plug-ins in `evaluation.metrics`. Answers for new inputs and calibration belong in `prediction`, sharpness
and curvature in `loss_landscape`."""
