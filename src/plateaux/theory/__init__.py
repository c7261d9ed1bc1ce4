"""The theory of flat and diverse ensembles: SAM on least squares with Gaussian data, after Lu et al. 2024.

`theorem1` and `theorem2` say how diverse and how sharp an ensemble is, corrected or as printed; `simulate` shows it.
"""

from plateaux.theory.frontier import Best, most_diverse
from plateaux.theory.phi import phi, trace_variance
from plateaux.theory.quadratic import Worst, sam_weights, worst_case
from plateaux.theory.setting import Setting, Unstable, stability_limit
from plateaux.theory.simulate import Simulated, simulate
from plateaux.theory.spectrum import exact_phi
from plateaux.theory.theorems import Prediction, jensen_gap, subset_constant, theorem1, theorem2

__all__ = [
    "Best", "Prediction", "Setting", "Simulated", "Unstable", "Worst", "exact_phi", "jensen_gap", "most_diverse", "phi",
    "sam_weights", "simulate", "stability_limit", "subset_constant", "theorem1", "theorem2", "trace_variance",
    "worst_case",
]  # fmt: skip
