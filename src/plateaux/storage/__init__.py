"""The object store, remote storage, leases, the run folder, caches of features and images, and imported weights.

Training and evaluation do not belong here."""
