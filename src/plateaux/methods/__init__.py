"""Plug-ins: one method a file, found by name."""
