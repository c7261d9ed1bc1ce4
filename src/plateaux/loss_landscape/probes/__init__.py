"""Plug-ins: one probe or family of probes per file, found by name. The registry imports every file here.

Numerical methods that probes share belong in `loss_landscape`."""
