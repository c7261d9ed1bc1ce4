"""Plateaux: deep ensembles whose members are flat and diverse, and that know when they do not know."""

__version__ = "0.1.0"
