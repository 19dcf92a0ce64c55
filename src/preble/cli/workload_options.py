"""Options of commands that take a workload."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from preble.cli.options import NOT_NEGATIVE_FLOAT, POSITIVE, POSITIVE_FLOAT, Command, all_of, option

if TYPE_CHECKING:
    from preble.lab.workloads import WorkloadPlan

DEFAULT_RPS = 4.0
"""Of a named workload, which has no times of its own."""

WORKLOAD_HELP = (
    "A trace file, a scenario (NAME.toml), a named workload, or several with + between "
    "(docs/reference/workloads.md): agent, coding, longdoc, multiturn, programming, tool_use, toolbench, unshared, "
    "video."
)


def workload_plan(
    source: str, requests: int | None, default_requests: int, default_rps: float | None = None, **rest: Any
) -> tuple[WorkloadPlan, dict[str, Any]]:
    """Return the plan for the values of `workload_options` among `rest`, and the other values.

    `requests`: None for all of a file, and for `default_requests` of a workload without end. `default_rps`:
    of a named workload, unless its arrivals are a recording's.
    """
    from preble.lab.workloads import WorkloadPlan, is_endless, workload_names
    from preble.lab.workloads.arrivals import ARRIVALS

    if requests is None and is_endless(source):
        requests = default_requests
    of_plan = {name: rest.pop(name) for name in WorkloadPlan.__struct_fields__ if name in rest}
    if of_plan.get("rps") is None and source in workload_names() and of_plan.get("arrivals") in ARRIVALS:
        of_plan["rps"] = default_rps
    return WorkloadPlan(source=source, requests=requests, **of_plan), rest


def workload_options(default_requests: int) -> Callable[[Command], Command]:
    """Add the options of a workload. `default_requests`: of a named workload, which has no end."""
    return all_of(
        option("--workload", WORKLOAD_HELP, default="tool_use", metavar="NAME|FILE|MIX"),
        seeded_workload_options(
            default_requests, f"{DEFAULT_RPS:g} for a named workload, otherwise the trace's own times"
        ),
    )


def seeded_workload_options(
    default_requests: int, default_rps: str = "the trace's own times"
) -> Callable[[Command], Command]:
    """Add the options of a workload, without its name."""
    return all_of(
        option("--rps", f"Requests a second on average.  [default: {default_rps}]", POSITIVE_FLOAT),
        option("--seed", "The same seed gives the same requests at the same times.", int, default=0),
        workload_shape_options(default_requests),
    )


def workload_shape_options(default_requests: int | str) -> Callable[[Command], Command]:
    """Add the options of a workload without its name, rate and seed, of which a command may take several."""
    return all_of(
        option("--requests", f"Number of requests.  [default: all of a trace, otherwise {default_requests}]", POSITIVE),
        option(
            "--arrivals",
            "How requests are spread over time: poisson, gamma, uniform, onoff, burst (all at once), or as in a "
            "trace file or a range of it, FILE[200:2200].",
            default="poisson",
            metavar="KIND|FILE",
        ),
        option("--cv", "Burstiness of gamma arrivals.", POSITIVE_FLOAT, default=1.0),
        option(
            "--popularity",
            "How requests are spread over tools or documents.  [default: the workload's own]",
            click.Choice(("uniform", "zipf", "recorded")),
        ),
        option("--zipf", "Exponent of --popularity zipf, which it implies.  [default: 1.1]", NOT_NEGATIVE_FLOAT),
        option(
            "--prefixes num_prefixes",
            "Number of different tools or documents.  [default: the workload's own]",
            POSITIVE,
        ),
    )
