"""Plug-ins: one measure a file, found by name."""
