"""A comparison as one self-contained HTML page. Needs matplotlib: the extra `plot`."""

from __future__ import annotations

from preble.lab.compare.figures import workload_drawings
from preble.lab.compare.numbers import DEFINITIONS, GOODPUT_DEFINITIONS, caution, shown_rates
from preble.lab.compare.plan import ComparePlan
from preble.lab.compare.result import CompareResult
from preble.lab.compare.tables import goodput_table, overview_table, ranking_table, rate_table
from preble.lab.report import Section, Table, Text, html_page
from preble.lab.report.page import Part


def compare_page(result: CompareResult, *, made: str = "") -> str:
    """Return a finished comparison's page. `made`: when and by which command. Raises: ConfigError: no matplotlib."""
    cluster = result.plan.cluster
    sections = [_section(result, workload) for workload in result.plan.workloads]
    if len(sections) > 1:
        sections.insert(0, Section("All workloads", [overview_table(result)]))
    return html_page(
        "Policies compared",
        [*sections, Section("How this was made", [_settings(result), Text(DEFINITIONS)])],
        subtitle=f"{len(result.plan.contenders)} policies on {cluster.replicas} simulated replicas "
        f"({cluster.profile.name})",
        made=made,
    )


def _section(result: CompareResult, workload: str) -> Section:
    warning = caution(result, workload)
    parts: list[Part] = [Text(warning)] if warning else []
    if result.plan.targets:
        parts += [goodput_table(result, workload, rps) for rps in shown_rates(result, workload)]
        parts.append(Text(GOODPUT_DEFINITIONS))
    parts += [ranking_table(result, workload), *workload_drawings(result, workload)]
    parts += [rate_table(result, workload, rps) for rps in shown_rates(result, workload)]
    return Section(workload, parts)


def _settings(result: CompareResult) -> Table:
    plan, cluster = result.plan, result.plan.cluster
    failures = ", ".join(f"{one.replica} {one.kind} at {one.time_s:g} s" for one in cluster.failures)
    rows = [
        ("replicas", str(cluster.replicas)),
        ("cost profile", cluster.profile.name),
        (
            "KV cache of a replica",
            f"{cluster.num_blocks * cluster.block_size:,} tokens in blocks of {cluster.block_size}",
        ),
        (
            "tokens of an iteration",
            ", ".join(f"{tokens:,}" for tokens in plan.chunks or (cluster.max_batch_tokens,)) + " at most",
        ),
        ("order on a replica", str(cluster.order)),
        ("window H", f"{cluster.window_s:g} s"),
        ("what fails", failures or "nothing"),
        ("seeds", ", ".join(map(str, plan.seeds))),
        ("rates", _rates(plan)),
        *((workload, _described(result, workload)) for workload in plan.workloads),
        ("runs", str(len(result.runs))),
        ("made by", f"Preble {result.version}"),
    ]
    return Table(("setting", "value"), rows)


def _rates(plan: ComparePlan) -> str:
    if plan.rates:
        return ", ".join("recorded" if rate is None else f"{rate:g}" for rate in plan.rates)
    loads = ", ".join(f"{load:g}" for load in plan.loads)
    return f"searched, then {loads} of the best capacity" if plan.search else f"{loads} of what no policy sustains"


def _described(result: CompareResult, workload: str) -> str:
    plan = result.plan.workloads[workload]
    run = next(run for run in result.runs if run.label == workload)
    return f"{run.summary.requests:,} requests, arrivals {plan.arrivals}"
