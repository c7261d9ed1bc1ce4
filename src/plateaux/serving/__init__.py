"""The HTTP service of a bundle: `plateaux serve`. Importing this package does not import torch.

Predictors and bundles belong in `deploy`."""
