"""The SGLang server on a CPU: `python launch.py --model-path ...`; options are those of `sglang.launch_server`.

`--version` prints the version and ends.

The stand-ins are imported at the top and outside of the guard on purpose: SGLang starts its processes with "spawn",
which imports this file again in each of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import stand_ins  # noqa: F401 (importing it is what makes SGLang importable)

if "--enable-hierarchical-cache" in sys.argv:
    import host_memory  # noqa: F401 (importing it is what makes that option work)
if "--enable-lora" in sys.argv:
    import unpinned  # noqa: F401 (likewise)
if "--disaggregation-mode" in sys.argv:
    import kv_on_host  # noqa: F401 (likewise)


def main(argv: list[str]) -> None:
    if argv == ["--version"]:
        import sglang.srt.entrypoints.http_server  # noqa: F401 (that it can be imported is what is asked for)
        from sglang.version import __version__

        print(__version__)
        return
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
