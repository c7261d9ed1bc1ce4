"""Adapters for other libraries: one file per library, imported only when it is used."""
