"""What SGLang's prefill and decode servers (`--disaggregation-mode`) need on a CPU: NIXL, and KV that lies on the host.

SGLang names its KV "VRAM" on every device, and NIXL refuses host memory under that name. Importing this module makes it
"DRAM". Run SGLang with `--disaggregation-transfer-backend nixl`, and a decode server besides with
`--disaggregation-decode-retraction-backup cpu_tensor`. NIXL is that of `python3 dev/setup.py nixl`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[3]
ENVIRON = {
    "UCX_TLS": "tcp,self,sm",
    # Sending what is cached before the rest is computed wants an event of CUDA.
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
}


def on_host(method: Callable[..., Any], place: int) -> Callable[..., Any]:
    """The same method of NIXL's agent, whose argument at `place` (`mem_type`) says "DRAM" for "VRAM"."""

    def called(*arguments: Any, **named: Any) -> Any:
        changed = list(arguments)
        if len(changed) > place and changed[place] == "VRAM":
            changed[place] = "DRAM"
        if named.get("mem_type") == "VRAM":
            named["mem_type"] = "DRAM"
        return method(*changed, **named)

    return called


def put_in_place() -> None:
    sys.path += map(str, (PROJECT / ".servers" / "nixl" / "lib").glob("python*/site-packages"))
    try:
        import nixl._api as api
    except ImportError as error:
        raise SystemExit(f"NIXL is not here ({error}): run `python3 dev/setup.py nixl`") from error
    for name, place in (("register_memory", 2), ("get_xfer_descs", 2), ("get_reg_descs", 2), ("prep_xfer_dlist", 3)):
        setattr(api.nixl_agent, name, on_host(getattr(api.nixl_agent, name), place))
    for name, value in ENVIRON.items():
        os.environ.setdefault(name, value)


put_in_place()
