"""Metric plugins: one metric or family of metrics per file. The registry imports every file in this package.

The loop that runs metrics is `plateaux.evaluation.metric_loop`."""
