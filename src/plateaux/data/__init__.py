"""Plug-ins: one data set a file, found by name."""
