"""Commands that `plateaux` has while this package is installed."""
