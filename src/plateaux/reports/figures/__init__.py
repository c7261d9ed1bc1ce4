"""Figures of a report, one family per file. Each takes plain findings and draws nothing if there are none.

Plots of the loss landscape itself belong in `loss_landscape`."""
