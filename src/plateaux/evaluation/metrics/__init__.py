"""Plug-ins: one metric or family of metrics per file, found by name. The registry imports every file here.

The loop that runs metrics belongs in `evaluation`."""
