"""Theory of flat and diverse ensembles: SAM on least squares with Gaussian data, after Lu et al. 2024.

`theorem1` and `theorem2` predict the diversity and the sharpness of an ensemble, corrected or as printed; `simulate`
measures both. Formulas, simulation, and figures belong here; studies of trained networks belong in `studies`.
"""

from plateaux_papers.theory.frontier import FrontierPoint, most_diverse
from plateaux_papers.theory.phi import phi, trace_variance
from plateaux_papers.theory.quadratic import WorstCase, sam_weights, worst_case
from plateaux_papers.theory.setting import Setting, UnstableWarning, stability_limit
from plateaux_papers.theory.simulate import SimulationResult, simulate
from plateaux_papers.theory.spectrum import exact_phi
from plateaux_papers.theory.theorems import Prediction, jensen_gap, subset_constant, theorem1, theorem2

__all__ = [
    "FrontierPoint", "Prediction", "Setting", "SimulationResult", "UnstableWarning", "WorstCase", "exact_phi",
    "jensen_gap", "most_diverse", "phi", "sam_weights", "simulate", "stability_limit", "subset_constant", "theorem1",
    "theorem2", "trace_variance", "worst_case",
]  # fmt: skip
