"""Answers of an ensemble: the predictor with its input contract, predictions and their files, calibration, cascades.

Selections and soups of members belong here, too. Bundles and everything that opens them belong in `deploy`."""
