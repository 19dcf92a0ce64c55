"""Draw and fill in docs/concepts/behind-the-scheduler.md from what one request does to a real scheduler.

    python docs/figures/behind_the_scheduler.py

The setting is that of docs/concepts/e2-by-example.md, with the default policy. The first request makes a replica cache
a prompt; the page follows the second one, which shares most of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "repro"))

import e2_scenario as scenario  # noqa: E402
from page import filled, markdown  # noqa: E402

from preble.core.types import BlocksStored, Placement, ReplicaId, Request, RequestId, pack_tokens  # noqa: E402
from preble.lab.report import Table  # noqa: E402

PAGE = ROOT / "docs" / "concepts" / "behind-the-scheduler.md"
FIGURE = PAGE.with_suffix("") / "parts.svg"
REPLICA = ReplicaId("A")
FIRST, FOLLOWED = scenario.ASKS[:2]
WINDOW_S, GRACE_S = 180.0, 1.0


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of replica A in the scheduler after one call. `usable_tokens`: of the same prompt, if it came again."""

    time_s: float
    call: str
    in_flight: int
    waiting_tokens: int
    load_s: float
    tree_tokens: int
    usable_tokens: int
    pending_reports: int


class Followed:
    """The second request, one call at a time. `placement`: where it went; `moments`: the state after each call."""

    def __init__(self, seed: int) -> None:
        self._cluster = scenario.Cluster(seed, policy="preble")
        self._scheduler = self._cluster.scheduler
        self._request = Request.of(FOLLOWED.name, scenario.token_ids(FOLLOWED), scenario.OUTPUT_TOKENS)
        self.first = self._cluster.serve(FIRST).placement
        self.moments: list[Moment] = []
        self.placement = self._serve()

    def _serve(self) -> Placement:
        request, now = self._request, FOLLOWED.at
        self._scheduler.on_timer(now)
        self.moments.append(self._moment("before", now))
        placement = self._scheduler.place(request, now)
        self.moments.append(self._moment("`place`", now))
        engine = self._cluster.engines[placement.replica_id]
        engine.add(request, pack_tokens(range(scenario.OUTPUT_TOKENS)), now)
        while (batch := engine.next_batch(now)) is not None:
            chunks = [(chunk.new_tokens, chunk.tokens_before) for chunk in batch.prefills]
            now += self._cluster.model.iteration_s(chunks, len(batch.decodes), batch.decode_context_tokens)
            result = engine.complete(batch, now)
            if result.prefilled:
                self._scheduler.on_first_token(request.request_id, now)
                self.moments.append(self._moment("`on_first_token`", now))
            stored = [event for event in engine.take_events() if isinstance(event, BlocksStored)]
            for event in stored:
                self._scheduler.on_stored(event, now)
            if stored and len(self.moments) == 3:
                self.moments.append(self._moment("`on_stored`", now))
        self._scheduler.on_finish(RequestId(request.request_id), scenario.OUTPUT_TOKENS, now)
        self.moments.append(self._moment("`on_finish`", now))
        for due in (now + GRACE_S, FOLLOWED.at + WINDOW_S):
            self._scheduler.on_timer(due)
            self.moments.append(self._moment("`on_timer`", due))
        return placement

    def _moment(self, call: str, now: float) -> Moment:
        state = self._scheduler.snapshot()
        replica = state.replicas[REPLICA]
        return Moment(
            now,
            call,
            replica.num_requests,
            replica.waiting_prefill_tokens,
            replica.load_s,
            state.num_index_tokens,
            self._scheduler.matched_tokens(REPLICA, self._request),
            len(self._scheduler._tracker.kept_uses()),
        )


def run() -> Followed:
    """The example. Ties are broken at random: of all seeds, the first with which the first request goes to A."""
    return next(followed for seed in range(1_000) if (followed := Followed(seed)).first.replica_id == REPLICA)


def moments_table(followed: Followed) -> Table:
    """What each part has, after each call."""
    return Table(
        ("t", "after", "in flight", "tokens to compute", "load", "tree", "usable", "pending reports"),
        [
            (
                f"{moment.time_s:.1f} s",
                moment.call,
                str(moment.in_flight),
                f"{moment.waiting_tokens:,}",
                f"{moment.load_s:.1f} s",
                f"{moment.tree_tokens:,}",
                f"{moment.usable_tokens:,}",
                str(moment.pending_reports),
            )
            for moment in followed.moments
        ],
        caption="Of replica A. *Tree*: tokens in the radix tree. *Usable*: tokens that A would serve from its cache if "
        "the prompt came again.",
    )


def made(followed: Followed) -> dict[str, str]:
    """Everything on the page that the scheduler computed, by marker."""
    placement = followed.placement
    return {
        "moments": markdown(moments_table(followed)),
        "value:prompt": f"{placement.num_prompt_tokens:,}",
        "value:matched": f"{placement.matched_tokens:,}",
        "value:missed": f"{placement.num_prompt_tokens - placement.matched_tokens:,}",
        "value:replica": str(placement.replica_id),
    }


# The drawing: boxes by hand, so that it needs no library and takes the reader's colours.


@dataclass(frozen=True, slots=True)
class Box:
    """One part of the scheduler. `lines`: what it keeps. `number`: what it has after `place`."""

    x: int
    y: int
    width: int
    title: str
    lines: tuple[str, ...]
    number: str = ""
    height: int = 92


def boxes(followed: Followed) -> list[Box]:
    placed, placement = followed.moments[1], followed.placement
    matched = f"r2: {placement.matched_tokens:,} of {placement.num_prompt_tokens:,} match"
    return [
        Box(20, 60, 820, "GlobalScheduler", (CALLS,), height=56),
        Box(20, 164, 190, "ClusterView", ("the cluster as one", "request finds it, read-only"), matched),
        Box(230, 164, 190, "Policy", ("chooses a replica", "by costs or a score"), f"r2 → {placement.replica_id}"),
        Box(
            440,
            164,
            190,
            "InFlightTable",
            ("what each request counts", "for until it ends"),
            f"{placed.in_flight} request",
        ),
        Box(
            650,
            164,
            190,
            "CacheTracker",
            ("keeps the index true to the", "replicas; memory budget"),
            f"{placed.pending_reports} pending reports",
        ),
        Box(
            36,
            330,
            150,
            "ReplicaTable",
            ("requests and tokens", "on each replica"),
            f"A: {placed.waiting_tokens:,} tokens wait",
        ),
        Box(196, 330, 150, "LoadWindow", ("work placed in the", "last H seconds"), f"A: {placed.load_s:.1f} s"),
        Box(
            356,
            330,
            190,
            "CostModel",
            ("tokens to seconds", ""),
            f"{placed.waiting_tokens:,} tokens = {placed.waiting_tokens / 1000:.1f} s",
        ),
        Box(
            556,
            330,
            190,
            "PrefixIndex",
            ("radix tree, and what", "each replica caches"),
            f"{placed.tree_tokens:,} tokens",
        ),
    ]


CALLS = "place · move · on_first_token · on_finish · on_stored · on_evicted · on_timer · snapshot"
ARROWS = (
    (115, 116, 115, 160, "1 match"),
    (210, 210, 228, 210, "2"),
    (420, 210, 438, 210, "3"),
    (535, 116, 535, 160, "4 commit"),
    (745, 116, 745, 160, "5 reports"),
    (115, 256, 115, 292, "reads"),
    (535, 256, 535, 292, "writes"),
    (745, 256, 745, 292, "writes"),
)
STYLE = """svg{color:#1d2430;background:#fff;font:13px system-ui,sans-serif}
.box{fill:#3d7fd1;fill-opacity:.12;stroke:#3d7fd1}.state{fill:none;stroke:currentColor;stroke-opacity:.45}
.title{font-weight:600;font-size:14px}.number{fill:#b96f00;font-weight:600}.arrow{stroke:currentColor;stroke-width:1.3}
text{fill:currentColor}.small{font-size:12px}.head{fill:currentColor}
@media (prefers-color-scheme:dark){svg{color:#e4e8ee;background:#171b22}.number{fill:#f3b450}}"""


def drawing(followed: Followed) -> str:
    """The figure as an SVG file, in the reader's light or dark scheme."""
    parts = [*_arrows(), '<rect class="state" x="20" y="294" width="820" height="144" rx="6"/>']
    parts.append('<text x="36" y="316"><tspan class="title">ClusterState</tspan>: what the scheduler knows</text>')
    parts.append(
        '<text x="20" y="34">The gateway or the simulator calls; time is an argument; the answer is a value.</text>'
    )
    for box in boxes(followed):
        parts += _drawn(box)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 860 456" width="860" height="456">'
        "<title>The parts behind the scheduler's interface</title>"
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _drawn(box: Box) -> Iterator[str]:
    yield f'<rect class="box" x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"/>'
    texts = [("title", box.title), *(("small", line) for line in box.lines), ("small number", box.number)]
    for i, (kind, text) in enumerate(texts):
        if text:
            yield f'<text class="{kind}" x="{box.x + 10}" y="{box.y + 22 + 20 * i}">{escape(text)}</text>'


def _arrows() -> Iterator[str]:
    yield (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0 8 4 0 8z"/></marker></defs>'
    )
    for x1, y1, x2, y2, text in ARROWS:
        yield f'<line class="arrow" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#head)"/>'
        if len(text) > 1:
            yield f'<text class="small" x="{x1 + 8}" y="{(y1 + y2) // 2 + 4}">{escape(text)}</text>'


def main() -> None:
    followed = run()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    FIGURE.write_text(drawing(followed), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), made(followed)), encoding="utf-8")


if __name__ == "__main__":
    main()
