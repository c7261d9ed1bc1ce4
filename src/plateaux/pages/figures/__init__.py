"""Figures of a report, one family a file: each takes plain findings, and draws nothing where there is nothing."""
