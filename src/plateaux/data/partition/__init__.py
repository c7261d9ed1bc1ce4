"""Rules that assign samples to the sharpness-aware sets of the members, and the packed masks that store them.

The phase of training that applies them belongs in `training.partition`."""
