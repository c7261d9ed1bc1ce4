"""The process pool, the Ray worker pool, and synchronized batch normalization.

Executors are plug-ins in `distributed.executors`. Code specific to training or evaluation does not belong here."""
