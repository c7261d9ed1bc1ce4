"""Plug-ins: one executor per file, found by name. The registry imports every file here.

Process pools and worker pools belong in `distributed`."""
