"""Plateaux: deep ensembles whose members are flat and diverse, and that know when they do not know.

recipe = plateaux.Recipe.load("quickstart")
run = plateaux.train(recipe, out="runs/quickstart")
result = plateaux.evaluate(run)
print(result["accuracy"].ensemble.value)
predictions = plateaux.load_predictor(run)(images)

`__init__.pyi` lists the public names. Each is imported at its first use, because all of them together import torch,
which takes seconds, and `plateaux --help` needs none.
"""

from plateaux.core.imports import attach_stub as _attach_stub

__version__ = "0.1.0"

__all__, __getattr__, __dir__ = _attach_stub(__name__, __file__)
