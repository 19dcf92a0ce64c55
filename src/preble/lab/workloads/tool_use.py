"""Tool use with real text: the tools are standard-library modules, their documentation is the prompt.

A prompt is a shared system prompt, one tool's documentation (signatures and docstrings, read at run time), and a unique
question. The popularity of tools follows Zipf's law. The same seed and the same Python version give the same workload,
byte for byte.
"""

from __future__ import annotations

import importlib
import inspect
import random
import re
import textwrap
import warnings
from collections.abc import Iterator
from types import ModuleType

from preble.errors import ConfigError
from preble.lab.workloads.model import Segment, Workload, WorkloadRequest
from preble.lab.workloads.popularity import Zipf

# fmt: off
TOOL_MODULES = (
    "argparse", "array", "ast", "base64", "bisect", "calendar", "cmath", "cmd", "codecs", "collections", "colorsys",
    "concurrent.futures", "configparser", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib",
    "dis", "email.message", "enum", "fileinput", "filecmp", "fnmatch", "fractions", "ftplib", "functools", "getopt",
    "gettext", "glob", "gzip", "hashlib", "heapq", "hmac", "html.parser", "http.client", "http.cookies", "imaplib",
    "inspect", "ipaddress", "itertools", "json", "locale", "logging", "lzma", "mailbox", "math", "mimetypes",
    "multiprocessing", "netrc", "numbers", "operator", "optparse", "os.path", "pathlib", "pickle", "pkgutil",
    "plistlib", "poplib", "pprint", "queue", "quopri", "random", "re", "reprlib", "sched", "secrets", "selectors",
    "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver", "sqlite3", "ssl", "statistics", "string",
    "struct", "subprocess", "symtable", "sysconfig", "tarfile", "tempfile", "textwrap", "threading", "timeit",
    "tokenize", "traceback", "types", "typing", "unicodedata", "unittest", "urllib.parse", "uuid", "warnings",
    "weakref", "xml.dom.minidom", "xml.etree.ElementTree", "xmlrpc.client", "zipfile", "zoneinfo",
)
# fmt: on

SYSTEM_PROMPT = """\
You are a careful assistant of a team that automates its daily work in Python. For every question you are given the
documentation of one tool, which is a module of Python's standard library. Answer with exactly one call.

Rules:
1. Use only what the documentation below defines. If it does not suffice, say NO SUITABLE FUNCTION and nothing else.
2. Write the call in full, with the module's name before it and every argument by name where the signature allows it.
3. Values that the question gives are used as they are; do not invent values, and do not convert units.
4. If the call can raise an error that the question has to expect, name the error in a comment behind the call.
5. Prefer the function with the fewest side effects: do not write files, open sockets or start processes unless asked.
6. Do not explain. The answer is read by a program.

"""

QUESTIONS = (
    "Our {job} handles {count} {things} a day. Which call to {member} should it make for {item}, and how?",
    "Ticket {ticket}: the {job} fails on {item}. Show the call to {member} that copes with {count} {things} at once.",
    "In the {job} I want to replace a loop over {count} {things} by one use of {member}. What does it look like?",
    "A colleague suggests {member} for the {things} of our {job}. Write the call that processes {item} first.",
    "Given {count} {things} from the {job}, use {member} so that {item} is treated as the exception it is.",
)
JOBS = ("nightly billing export", "web crawler", "sensor gateway", "mail archive", "build server", "payroll import")
THINGS = ("records", "log lines", "measurements", "attachments", "customer names", "time stamps", "file paths")

MIN_TOOL_CHARS = 1500
MAX_TOOL_CHARS = 4200
"""Bounds of one tool's documentation: roughly 500 to 1500 tokens."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def tool_use(
    num_requests: int,
    seed: int,
    *,
    zipf: float = 1.1,
    num_prefixes: int = 64,
    output_tokens: tuple[int, int] = (8, 24),
) -> Workload:
    """Return a tool-use workload without arrival times. The seed decides which tools are popular.

    `num_prefixes`: the number of tools. `output_tokens`: the least and the most that a request asks for; uniform.

    Raises: ConfigError: too many tools, or a bad popularity.
    """
    rng = random.Random(f"tool_use/{seed}")
    names = list(TOOL_MODULES)
    rng.shuffle(names)
    tools = _documented(names, num_prefixes)
    popularity = Zipf(num_prefixes, zipf)
    system = Segment("system", text=SYSTEM_PROMPT)
    requests = []
    for i in range(num_requests):
        name, tool = tools[popularity.pick(rng)]
        question = Segment(text=_question(i, name, tool.text or "", rng))
        requests.append(
            WorkloadRequest(f"tool_use-{i}", (system, tool, question), rng.randint(*output_tokens), group=name)
        )
    note = f"tool use over {num_prefixes} standard-library modules, Zipf {zipf}, seed {seed}"
    return Workload("tool_use", tuple(requests), note)


def tool_documentation(module: ModuleType, max_chars: int = MAX_TOOL_CHARS) -> str:
    """Return the module's docstring, then each public name's signature and docstring, in whole lines up to `max_chars`.

    It omits what changes from run to run, such as addresses in the representation of defaults.
    """
    parts = [f"## Tool: {module.__name__}\n\n{_doc(module)}\n"]
    length = len(parts[0])
    for name, member in _members(module):
        part = f"\n### {module.__name__}.{name}{_signature(member)}\n{textwrap.indent(_doc(member), '    ')}\n"
        parts.append(part)
        length += len(part)
        if length >= max_chars:
            break
    whole = _ADDRESS.sub("", "".join(parts))
    return whole if len(whole) <= max_chars else whole[: whole.rindex("\n", 0, max_chars) + 1]


def _documented(names: list[str], num_tools: int) -> list[tuple[str, Segment]]:
    """Return the first `num_tools` modules that exist here and have enough documentation."""
    tools: list[tuple[str, Segment]] = []
    for name in names:
        text = _documentation_of(name)
        if len(text) >= MIN_TOOL_CHARS:
            tools.append((name, Segment(f"tool:{name}", text=text)))
        if len(tools) == num_tools:
            return tools
    raise ConfigError(f"only {len(tools)} modules have enough documentation for a tool, not {num_tools}; ask for fewer")


def _documentation_of(name: str) -> str:
    """Return the module's documentation; "" if this Python lacks the module."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return tool_documentation(importlib.import_module(name))
    except ImportError:
        return ""


def _members(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Return public functions and classes with a docstring, by name."""
    for name in sorted(getattr(module, "__all__", vars(module))):
        member = getattr(module, name, None)
        if not name.startswith("_") and (inspect.isroutine(member) or inspect.isclass(member)) and _doc(member):
            yield name, member


def _doc(thing: object) -> str:
    return inspect.getdoc(thing) or ""


def _signature(member: object) -> str:
    try:
        return str(inspect.signature(member))  # type: ignore[arg-type]  # refuses what is not callable by itself
    except (TypeError, ValueError):
        return "(...)"


def _question(number: int, module: str, documentation: str, rng: random.Random) -> str:
    members = re.findall(r"^### ([\w.]+)", documentation, flags=re.MULTILINE) or [module]
    question = rng.choice(QUESTIONS).format(
        member=rng.choice(members),
        job=rng.choice(JOBS),
        things=rng.choice(THINGS),
        count=rng.randint(2, 99_999),
        ticket=f"T-{rng.randrange(10**6):06}",
        item=f"item {rng.getrandbits(40):010x}",
    )
    return f"\n## Question {number}\n{question}\n\n## Answer\n"
