"""The floors of the house: imports go down only, and the rules that keep the core pure.

Rooms are the packages directly below `preble`; see docs/concepts/architecture.md for what lives in each.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from preble import serving

SRC = Path(__file__).parents[2] / "src"
PAGE = SRC.parent / "docs" / "concepts" / "architecture.md"
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

FLOORS = {
    "background": 0,
    "build": 0,
    "errors": 0,
    "logs": 0,
    "core": 1,
    "web": 1,
    "plugins": 2,
    "profiles": 2,
    "config": 3,
    "decisions": 3,
    "peers": 3,
    "discovery": 4,
    "engines": 5,
    "rules": 5,
    "prompts": 6,
    "emulator": 7,
    "lab": 7,
    "serving": 7,
    "gateway": 8,
    "reservations": 8,
    "integrations": 9,
    "picker": 9,
    "selection": 9,
    "api": 10,
    "cli": 10,
    "__main__": 11,
}
LAB_FLOORS = {
    "report": 0,
    "metrics": 1,
    "replay": 1,
    "workloads": 1,
    "sim": 2,
    "bench": 3,
    "compare": 3,
    "profiling": 4,
}
LOCAL_HALF = {"replica"}
GLOBAL_HALF = {"admission", "prefixes", "cluster", "policies", "placing"}
CORE_FLOORS = {
    "types": 0,
    "replica_index": 0,
    "admission": 2,
    "costs": 1,
    "prefixes": 2,
    "replica": 2,
    "cluster": 3,
    "policies": 4,
    "placing": 5,
}
ENGINE_LIBRARIES = {"vllm", "sglang", "ray", "torch"}
ENGINE_ROOMS = {"engines", "integrations"}
CARRIERS = {"gateway", "integrations", "picker", "reservations", "selection"}
HTTP_LIBRARIES = {"aiohttp", "httptools", "http", "urllib", "socket", "asyncio", "zmq"}
IMPURE_STDLIB = {"asyncio", "logging", "os", "pathlib", "socket", "subprocess", "threading", "time", "datetime"}


class Import(NamedTuple):
    source: str
    """The module that imports, dotted."""
    target: str
    """The module, or the name in a module, that is imported, dotted."""
    line: int

    def __str__(self) -> str:
        return f"{self.source} (line {self.line}) imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files() -> list[Path]:
    return sorted((SRC / "preble").rglob("*.py"))


def imports_of(path: Path) -> Iterator[Import]:
    """Every import statement of a file, those inside functions too."""
    source = module_name(path)
    package = source if path.name == "__init__.py" else source.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (Import(source, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1]]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (Import(source, f"{module}.{alias.name}", node.lineno) for alias in node.names)


ALL_IMPORTS = [found for path in source_files() for found in imports_of(path)]
OWN_IMPORTS = [found for found in ALL_IMPORTS if found.target.split(".")[0] == "preble"]


def room(module: str) -> str:
    """The room of a dotted module below preble; "" for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else ""


def below_core(module: str) -> str:
    """`preble.core.policies.e2.E2` -> `e2`; "" for anything outside core."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["preble", "core"] and len(parts) > 2 else ""


def folder(module: str) -> str:
    """`preble.gateway.http.page_client.PageClient` -> `http`; "" for a file at the room's top."""
    parts = module.split(".")
    inside = SRC.joinpath(*parts[:3])
    return parts[2] if len(parts) > 3 and inside.is_dir() else ""


def library(found: Import) -> str:
    return found.target.split(".")[0]


def test_every_room_has_a_floor() -> None:
    rooms = {path.relative_to(SRC / "preble").parts[0].removesuffix(".py") for path in source_files()} - {"__init__"}
    assert rooms <= FLOORS.keys(), f"give these a floor in FLOORS: {sorted(rooms - FLOORS.keys())}"


def test_the_page_of_rooms_has_every_room_with_its_floor() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| \S", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {name: int(floor) for floor, name in rows} == FLOORS


def test_imports_go_down_only() -> None:
    upward = [
        str(found)
        for found in OWN_IMPORTS
        if room(found.source)
        and room(found.target)
        and room(found.source) != room(found.target)
        and FLOORS[room(found.source)] <= FLOORS[room(found.target)]
    ]
    assert upward == []


def test_only_the_commands_and_the_public_names_import_the_laboratory() -> None:
    assert {room(found.source) for found in OWN_IMPORTS if room(found.target) == "lab"} == {"api", "cli", "lab"}


def test_imports_inside_the_laboratory_go_down_only() -> None:
    upward = [
        str(found)
        for found in OWN_IMPORTS
        if room(found.source) == room(found.target) == "lab"
        if (source := found.source.split(".")[2]) != (target := found.target.split(".")[2])
        if LAB_FLOORS[source] <= LAB_FLOORS[target]
    ]
    assert upward == []


def test_the_page_has_every_room_of_the_laboratory_with_its_floor() -> None:
    rows = re.findall(r"^\| (\d) \| `lab/(\w+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {name: int(floor) for floor, name in rows} == LAB_FLOORS
    assert {path.name for path in (SRC / "preble" / "lab").iterdir() if path.is_dir()} - {
        "__pycache__"
    } == LAB_FLOORS.keys()


def test_rules_have_no_clock_thread_log_or_file() -> None:
    impure = [str(found) for found in ALL_IMPORTS if room(found.source) == "rules" and library(found) in IMPURE_STDLIB]
    assert impure == []


def test_carriers_use_only_the_serving_rooms_interface() -> None:
    """Names that `preble.serving` exports: never one of its modules, so that its inside can change."""
    exported = {f"preble.serving.{name}" for name, value in vars(serving).items() if not isinstance(value, ModuleType)}
    inside = [
        str(found)
        for found in OWN_IMPORTS
        if room(found.source) in CARRIERS and room(found.target) == "serving" and found.target not in exported
    ]
    assert inside == []


def test_imports_inside_the_gateway_go_down_only() -> None:
    """Pages and placed requests stand on `http`, the application above both, and several processes above it."""
    floors = {"http": 0, "pages": 1, "requests": 1, "": 2, "workers": 3}
    upward = [
        str(found)
        for found in OWN_IMPORTS
        if room(found.source) == room(found.target) == "gateway"
        and (source := folder(found.source)) != (target := folder(found.target))
        and floors[source] <= floors[target]
    ]
    assert upward == []


def test_core_imports_only_the_standard_library_numpy_and_errors() -> None:
    """And `msgspec`, for the values that cross every boundary."""
    allowed = sys.stdlib_module_names | {"numpy"}
    foreign = [
        str(found)
        for found in ALL_IMPORTS
        if room(found.source) == "core"
        and library(found) not in allowed
        and not found.target.startswith(("preble.core", "preble.errors"))
        and not (found.source in ("preble.core.types.events", "preble.core.types.life") and library(found) == "msgspec")
    ]
    assert foreign == []


def test_core_has_no_clock_thread_log_or_file() -> None:
    impure = [str(found) for found in ALL_IMPORTS if room(found.source) == "core" and library(found) in IMPURE_STDLIB]
    assert impure == []


def test_core_uses_no_global_random_generator() -> None:
    """`random.Random` may be named (it is passed in); `random.random()` and the like may not be called."""
    calls = [
        f"{path.name}:{node.lineno} random.{node.attr}"
        for path in source_files()
        if room(module_name(path)) == "core"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "random"
        and node.attr != "Random"
    ]
    assert calls == []


def test_the_two_halves_of_core_never_import_each_other() -> None:
    crossing = [
        str(found)
        for found in OWN_IMPORTS
        for ours, theirs in ((GLOBAL_HALF, LOCAL_HALF), (LOCAL_HALF, GLOBAL_HALF))
        if below_core(found.source) in ours and below_core(found.target) in theirs
    ]
    assert crossing == []


def test_core_has_at_most_nine_rooms_each_with_a_floor_on_the_page() -> None:
    rooms = {path.stem for path in (SRC / "preble" / "core").iterdir()} - {"__init__", "__pycache__"}
    assert rooms == CORE_FLOORS.keys() and len(rooms) <= 9
    rows = re.findall(r"^\| (\d) \| `core/(\w+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {name: int(floor) for floor, name in rows} == CORE_FLOORS


def test_imports_inside_core_go_down_only() -> None:
    upward = [
        str(found)
        for found in OWN_IMPORTS
        if (source := below_core(found.source)) and (target := below_core(found.target)) and source != target
        if CORE_FLOORS[source] <= CORE_FLOORS[target]
    ]
    assert upward == []


def test_imports_inside_the_room_of_policies_go_down_only() -> None:
    """From the registry over the rules, splits, the shared scoring, the protocol, transfers and costs to the view.

    A rule with books of its own is a folder.
    """
    order = ["view", "cost_table", "transfers", "policy", "scoring", "splitting", "rules", "registry"]

    def place(module: str) -> int:
        name = module.split(".")[3]
        return order.index(name if name in order else "rules")

    inside = [
        found
        for found in OWN_IMPORTS
        if all(name.startswith("preble.core.policies.") for name in (found.source, found.target))
    ]
    between = [found for found in inside if found.source.split(".")[3] != found.target.split(".")[3]]
    assert [str(found) for found in between if place(found.source) <= place(found.target)] == []


def test_the_files_that_the_page_names_decide_what_it_says() -> None:
    rows = re.findall(r"^\| [^|]+\? \| `([\w/.]+)` \| `([\w.]+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 10
    for path, name in rows:
        tree = ast.parse((SRC / "preble" / path).read_text(encoding="utf-8"))
        for part in name.split("."):
            defined = {node.name: node for node in ast.iter_child_nodes(tree) if isinstance(node, DEFINITIONS)}
            assert part in defined, f"{path} has no {name}"
            tree = defined[part]


def test_a_class_name_stands_for_one_thing_where_it_can_be_met() -> None:
    """In one room, and in two of which one imports the other: who reads both would take one for the other."""
    met = {(room(found.source), room(found.target)) for found in OWN_IMPORTS}
    defined: dict[str, list[str]] = {}
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(module_name(path))
    two = {
        f"{name}: {one} and {other}"
        for name, modules in defined.items()
        for one, other in itertools.permutations(modules, 2)
        if room(one) == room(other) or (room(one), room(other)) in met
    }
    assert two == set()


def test_nothing_calls_writelines_of_a_transport() -> None:
    """Early versions of Python 3.12 and 3.13 never pause it, and keep an empty part for good."""
    assert [str(path) for path in source_files() if "transport.writelines(" in path.read_text()] == []


@cache
def names_of(path: Path) -> set[str]:
    """Return what a module binds at its top, in either branch of a condition too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.Import() | ast.ImportFrom():
                found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


def test_whatever_stands_outside_imports_only_what_is_there() -> None:
    """Some of it runs only beside Ray or vLLM, where a name that went is heard of late."""
    lost = []
    for room in ("benchmarks", "dev", "examples", "tests"):
        for path in (SRC.parent / room).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "preble" in text else ():
                if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "preble":
                    continue
                place = SRC / Path(*str(node.module).split("."))
                module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
                known = names_of(module) if module.exists() else set()
                lost += [
                    f"{path.relative_to(SRC.parent)}:{node.lineno}: {node.module}.{alias.name}"
                    for alias in node.names
                    if alias.name not in known and not list(place.glob(f"{alias.name}*"))
                ]
    assert not lost


def test_engines_are_imported_only_where_they_are_called_from() -> None:
    strays = [
        str(found)
        for found in ALL_IMPORTS
        if library(found) in ENGINE_LIBRARIES and room(found.source) not in ENGINE_ROOMS
    ]
    assert strays == []


def test_no_policy_knows_http() -> None:
    knowing = [str(found) for found in ALL_IMPORTS if room(found.source) == "core" and library(found) in HTTP_LIBRARIES]
    assert knowing == []


MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}
MUTABLE_NODES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name | ast.Attribute):
        name = value.func.id if isinstance(value.func, ast.Name) else value.func.attr
        return name in MUTABLE_CALLS
    return isinstance(value, MUTABLE_NODES)


def mutable_globals(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        is_public_list = any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets)
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value) and not is_public_list:
            yield f"{path.relative_to(SRC)}:{node.lineno}"


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_nothing_mutable_at_module_level(path: Path) -> None:
    """Wrap a constant table in MappingProxyType, frozenset or a tuple."""
    assert list(mutable_globals(path)) == []


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_no_function_rebinds_a_global(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)] == []


RAW_TASKS = {
    # of one request or one call, which hears of their end
    "engines/awaited.py:_begin_sending",
    "web/server/answering.py:run_until_wait",
    "integrations/ray/direct.py:__init__",
    "integrations/ray/placing.py:_place",
    "picker/calls.py:_begun",
    "serving/link/host.py:_in_background",
    # awaited where they are made, or by what they are made for
    "gateway/handover.py:begin",
    "cli/running.py:reported_waiting",
    "discovery/kubernetes.py:_next_before",
    "discovery/kubernetes.py:_of_pool",
    "discovery/kubernetes.py:_within_grace",
    "emulator/server.py:__aenter__",
    "emulator/server.py:_serve",
    "gateway/server.py:accepting",
    "gateway/workers/worker.py:start",
    "integrations/ray/placing.py:start",
    # short: they close, dial, abort or wait a moment
    "engines/kv_events/subscription.py:__init__",
    "engines/sglang/client.py:_abort_soon",
    "gateway/workers/process.py:cover",
    "integrations/ray/placing.py:placer_of",
    "picker/handshakes.py:_enter",
    "reservations/reservations.py:_release",
    "serving/group/nats.py:__init__",
    "serving/replicas/members.py:_join",
    "serving/replicas/members.py:reconcile",
    "web/client/pool.py:dial",
    "web/server/awaited.py:start",
}
"""Functions that start a task of the event loop itself, which may end with nobody hearing of it."""


def raw_tasks(path: Path) -> Iterator[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for function in filter(lambda node: isinstance(node, functions), ast.walk(ast.parse(path.read_text("utf-8")))):
        names = [ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Attribute)]
        if any(re.search(r"(asyncio|loop|loop\(\))\.(create_task|ensure_future)$", name) for name in names):
            yield f"{path.relative_to(SRC / 'preble')}:{function.name}"  # type: ignore[attr-defined]


def test_tasks_that_last_are_started_by_the_background_room() -> None:
    """Use `background.keep`, or an `asyncio.TaskGroup`; a task that is short goes onto the list above."""
    found = {name for path in source_files() if path.stem != "background" for name in raw_tasks(path)}
    assert found == RAW_TASKS
