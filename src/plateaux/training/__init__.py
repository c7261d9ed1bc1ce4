"""Training: the planner and its jobs, the trainer, the step, checkpoints, validation, and the partition phase.

Update rules belong in `optim`, methods in `methods`, and metrics in `evaluation`."""
