"""Plug-ins: one data set or family of data sets per file, found by name. The registry imports every file here.

Shared code for data sources belongs in `data`."""
