"""Data sources, loading, augmentation, and splits of the data that members are trained and evaluated on.

Data sets are plug-ins in `data.datasets`. Building data from a recipe belongs in `config.builders`."""
