"""Rules that decide which member gets which samples, and the packed masks that store the decision.

The phase of training that applies them belongs in `training.partition`."""
