"""Have torchvision's CUDA build, of which only the Python part is used, load beside a torch for CPUs.

Python imports this by itself where the folder is on PYTHONPATH; see `support.own_vllm`.
"""

from __future__ import annotations

import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from typing import Any


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Declares the operators for which torchvision registers stand-ins, just before it is imported."""

    def __init__(self) -> None:
        self.library: Any = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, DeclareOperators())
