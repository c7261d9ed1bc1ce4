"""Declare the operators that a CUDA build of torchvision lacks beside a CPU build of torch; no test calls them."""

import sys
from importlib import machinery, util


class Operators:
    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "torchvision._meta_registrations":  # imported after torchvision has loaded its own operators
            import torch

            for operator in () if hasattr(torch.ops.torchvision, "nms") else ("nms", "qnms"):
                torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou) -> Tensor")


sys.meta_path.insert(0, Operators)
rest = [entry for entry in sys.path if entry != __file__.rpartition("/")[0]]
if __name__ == "sitecustomize" and (hidden := machinery.PathFinder.find_spec(__name__, rest)):
    hidden.loader.exec_module(util.module_from_spec(hidden))
