"""Stores for files and objects, locks and leases, the run folder, feature and image caches, imported weights.

Training and evaluation do not belong here."""
