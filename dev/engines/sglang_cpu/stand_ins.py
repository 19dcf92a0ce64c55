"""What SGLang needs to be importable on a machine without a GPU, where two of its packages have no build.

Importing this module, before anything of SGLang, puts them in place:

- `torchvision`: PyPI has the CUDA build only. Its compiled part cannot be loaded beside a CPU torch, so the operators
  that its Python part refers to at import are declared here, without an implementation: text models call none of them.
- `sgl_kernel`: on a CPU SGLang imports it at once, but calls its layer kernels only where the processor has AMX (which
  SGLANG_USE_CPU_ENGINE=1 and no AMX kernels avoid: all layers fall back to plain torch). The stand-in gives any name
  that is asked for, as a function that says what is missing when it is called. One is implemented: SGLang's request
  pool may use it on a CPU.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import torch

PRETENDED_KERNEL_VERSION = "0.4.10"
"""Of sglang-kernel, as SGLang 0.5.23 wants it."""


def declare_torchvision_operators() -> torch.library.Library:
    """The two operators that torchvision 0.28 registers stand-ins for whether or not its compiled part is there."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *_: object,
) -> None:
    """Write each request's new cache locations into its row of the request-to-token table."""
    taken = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in spans:
        locations = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = locations.to(req_to_token.dtype)
        taken += end - start


class KernelStandIn(types.ModuleType):
    """Any function of `sgl_kernel`; all but one raise when they are called."""

    __version__ = PRETENDED_KERNEL_VERSION
    assign_req_to_token_pool_cpu = staticmethod(assign_req_to_token_pool_cpu)

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on a CPU; this model or option needs it")

        return missing


def put_in_place() -> None:
    """Make `import sgl_kernel` give the stand-in. Does nothing where the package is loaded already."""
    if "sgl_kernel" not in sys.modules:
        module = KernelStandIn("sgl_kernel")
        module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
        sys.modules["sgl_kernel"] = module


_declared = declare_torchvision_operators()
put_in_place()
