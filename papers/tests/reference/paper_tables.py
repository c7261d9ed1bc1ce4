"""Tables and figures of the papers whose claims are tested, number by number."""

from __future__ import annotations

# Lu et al. 2024, Figure 7: mean of members, gain on top, ensemble; deep ensemble, SAM, SharpBalance.
FIGURE_7 = {
    "CIFAR10-C": ((74.19, 1.64, 75.83), (75.45, 0.87, 76.32), (76.12, 1.20, 77.32)),
    "CIFAR100-C": ((47.66, 3.01, 50.67), (49.41, 1.88, 51.29), (50.43, 2.03, 52.46)),
    "TinyImageNet-C": ((26.30, 3.34, 29.64), (28.37, 2.45, 30.82), (29.27, 2.71, 31.98)),
    "CIFAR10": ((94.74, 0.84, 95.58), (95.66, 0.40, 96.06), (95.73, 0.45, 96.18)),
    "CIFAR100": ((76.77, 2.51, 79.28), (77.81, 1.69, 79.50), (78.06, 1.78, 79.84)),
    "TinyImageNet": ((65.75, 3.85, 69.60), (68.26, 2.43, 70.69), (68.36, 2.47, 70.83)),
}
# Lu et al. 2024, Tables 2 to 4: severities 1 to 5; deep ensemble, SAM, SharpBalance.
SEVERITIES = {
    "CIFAR10-C": (
        (88.90, 83.67, 77.56, 70.37, 58.63),
        (89.44, 84.24, 78.16, 71.04, 58.77),
        (89.75, 84.80, 78.98, 72.25, 60.78),
    ),
    "CIFAR100-C": (
        (65.78, 57.77, 51.30, 44.33, 34.16),
        (66.39, 58.47, 51.89, 44.90, 34.81),
        (67.23, 59.53, 53.14, 46.19, 36.20),
    ),
    "TinyImageNet-C": (
        (43.62, 36.65, 28.96, 22.08, 16.86),
        (45.20, 38.04, 30.19, 22.98, 17.71),
        (46.48, 39.53, 31.70, 24.27, 18.69),
    ),
}
# Lu et al. 2024, Figure 5: slopes by width and by sparsity, in the order its caption gives.
WIDTHS = {8: 0.58, 16: 0.54, 64: 0.33, 128: 0.28}
SPARSITIES = {0.99: 0.50, 0.95: 0.47, 0.8: 0.43, 0.0: 0.33}
# Lu et al. 2024, Table 8: additional and total minutes.
MINUTES = (0.83, 84.48)
# SED 2024, Table 1 (#unique) and Table 3 (AUROC): C-1, C-5, iNaturalist, OpenImages.
UNIQUE = {"deep ensemble": (1.09, 1.19, 1.31, 1.23), "SED": (5.00, 5.00, 4.68, 4.11)}
BMA = {
    "single": (0.615, 0.833, 0.958, 0.909),
    "deep ensemble": (0.619, 0.835, 0.958, 0.911),
    "diverse hyper-parameters": (0.642, 0.861, 0.969, 0.923),
    "DivDis": (0.598, 0.843, 0.966, 0.922),
    "A2D": (0.594, 0.835, 0.966, 0.916),
    "SED": (0.641, 0.845, 0.960, 0.915),
}
SED_PDS = (0.686, 0.896, 0.977, 0.939)
# Rethinking Sharpness 2025, Tables 1, 2, 5, 7: accuracy, ECE, corruption accuracy, disagreement, Fisher-Rao norm,
# SAM-sharpness, relative flatness; baseline first, then each control without and with SAM.
CONTROLS = ("baseline", "baseline + SAM", "augmentation", "augmentation + SAM", "decay", "decay + SAM")
RESNET_CIFAR10 = (
    (0.720, 0.186, 58.614, 0.282, 0.009, 4.052e-06, 34.607),
    (0.794, 0.108, 66.342, 0.168, 0.029, 3.072e-05, 75.093),
    (0.886, 0.077, 68.755, 0.121, 1.101, 1.693e-02, 2903.220),
    (0.908, 0.014, 71.419, 0.069, 1.529, 1.291e-02, 4970.972),
    (0.721, 0.174, 58.562, 0.281, 0.018, 8.493e-06, 59.767),
    (0.802, 0.096, 67.079, 0.162, 0.035, 3.051e-05, 88.807),
)
RESNET_CIFAR100 = (
    (0.530, 0.220, 38.760, 0.452, 0.080, 1.762e-03, 32.085),
    (0.556, 0.191, 41.888, 0.410, 0.109, 1.031e-03, 123.791),
    (0.697, 0.185, 44.613, 0.288, 0.981, 1.451e-01, 2766.925),
    (0.705, 0.145, 45.428, 0.269, 1.140, 1.022e-01, 4196.832),
    (0.521, 0.099, 37.868, 0.474, 0.235, 2.015e-03, 136.969),
    (0.543, 0.106, 40.604, 0.444, 0.488, 1.882e-03, 360.271),
)
VGG_CIFAR100_ACCURACY = (0.575, 0.561, 0.646, 0.656, 0.584, 0.553)
VIT_CIFAR10_ACCURACY = (0.610, 0.600, 0.724, 0.668, 0.613, 0.600)
