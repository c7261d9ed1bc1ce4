from plateaux.optim.sample_sharpness import SampleSharpness as SampleSharpness
from plateaux.optim.sharpness_aware import SharpnessAware as SharpnessAware
