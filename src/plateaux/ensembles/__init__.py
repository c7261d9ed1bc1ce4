"""The trained ensemble and computations on its outputs: combination, soups, selection, temperature, conformal sets.

Reading runs and evaluating them belongs in `evaluation`."""
