"""Stores for files and objects, the run folder, writers of its members, feature and image caches, imported weights.

Training and evaluation do not belong here."""
