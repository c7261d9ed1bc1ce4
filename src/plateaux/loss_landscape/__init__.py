"""The loss surface around a member: curvature, Lanczos, worst-case perturbations, slices, and plots.

Probes are plug-ins in `loss_landscape.probes`. Metrics of predictions belong in `evaluation`."""
