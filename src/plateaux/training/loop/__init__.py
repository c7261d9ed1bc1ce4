"""The inner loop of training: the state of a member, its step, validation, and checkpoints.

Planning, jobs, and the data partition belong in `training`. Update rules belong in `optim`."""
