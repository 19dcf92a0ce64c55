"""What SGLang's adapters (`--enable-lora`) need on a CPU: memory that it wants pinned for a GPU is ordinary here.

Torch refuses to pin memory where there is no accelerator. Importing this module makes it ignore the request. Run SGLang
with `--lora-backend torch_native`, the one that needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same function of torch, which ignores `pin_memory`."""

    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*arguments, **options)

    return made


def put_in_place() -> None:
    for name in ("tensor", "empty", "zeros", "ones", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


put_in_place()
