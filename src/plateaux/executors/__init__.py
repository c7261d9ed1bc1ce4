"""Plug-ins: one executor a file, found by name."""
