"""Training: checks of a recipe, the planner and its jobs, the data partition, and trackers.

The training of the members of one job is in `training.loop`, update rules in `optim`, and methods in `methods`."""
