"""The command line: arguments, output, progress, and exit codes.

A command calls the Python API and prints the result. The work itself belongs in the other packages."""
