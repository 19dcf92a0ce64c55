"""One decision as text for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple
from datetime import UTC, datetime
from textwrap import fill
from types import MappingProxyType

from preble.core.types import Reason, TransferKind
from preble.decisions.recent import CandidateCost, Decision

WIDTH = 100
LEAST_DELAY = "preble"
"""The policy whose L, M and P are seconds of delay that the request adds to all requests together."""
SIMULATED_BEFORE_S = 1e9
"""An earlier Unix time is a simulation's, whose clock begins at 0."""
SHOWN_CANDIDATES = 12
"""How many candidates of a large cluster are shown: the cheapest, and the chosen one."""


def explain(decision: Decision) -> str:
    """Return what was known, why this replica was chosen, and how the request ended, in several lines."""
    parts = [
        _headline(decision),
        *_asked(decision),
        _why(decision),
        *_untrusted(decision),
        *_table(decision),
        *_ways(decision),
        *_afterwards(decision),
    ]
    return "\n".join(parts)


def _headline(decision: Decision) -> str:
    return (
        f"request {decision.request_id}, placed {_when(decision.placed_at)} on {decision.replica}"
        f" ({decision.reason}, policy {decision.policy})"
    )


def _asked(decision: Decision) -> Iterator[str]:
    if decision.asked is not None:
        yield f"Its client asked for {decision.asked}."


def _when(unix_time_s: float) -> str:
    """
    >>> _when(1_795_288_682.422), _when(12.5)
    ('2026-11-21 19:18:02.422 UTC', 'at 12.500 s')
    """
    if unix_time_s < SIMULATED_BEFORE_S:
        return f"at {unix_time_s:.3f} s"
    return datetime.fromtimestamp(unix_time_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def _why(decision: Decision) -> str:
    if _has_scores(decision):
        sentence = _by_score(decision)
    elif decision.policy == LEAST_DELAY:
        sentence = _by_delay(decision)
    else:
        sentence = _SENTENCES[decision.reason](decision)
    return fill(sentence, WIDTH)


def _prompt(decision: Decision) -> str:
    """Return how much of the prompt the best candidate has cached."""
    cached = max((c.matched_tokens for c in decision.candidates), default=0)
    missing = decision.num_prompt_tokens - cached
    return f"Of {decision.num_prompt_tokens} prompt tokens, {cached} are cached at best and {missing} are missing"


def _cheapest(decision: Decision, who: str) -> str:
    """Return which candidate was cheapest; the candidates are those `who`."""
    if len(decision.candidates) == 1:
        return f"{decision.replica} is the only one {who}."
    ties = _ties(decision)
    how = f"shares the lowest L + M + P with {ties} and was drawn by lot" if ties else "has the lowest L + M + P"
    return f"of the {len(decision.candidates)} {who}, {decision.replica} {how}."


def _ties(decision: Decision) -> int:
    """Return how many others cost as little as the cheapest."""
    lowest_s = min(c.cost_s for c in decision.candidates)
    return sum(c.cost_s == lowest_s for c in decision.candidates) - 1


def _exploit(decision: Decision) -> str:
    who = "that hold the cached part and serve it"
    return f"{_prompt(decision)}, so the request follows the cache; {_cheapest(decision, who)}"


def _explore(decision: Decision) -> str:
    return f"{_prompt(decision)}: too little to follow the cache; {_cheapest(decision, 'that could take it')}"


def _balance(decision: Decision) -> str:
    return (
        f"Too little of the {decision.num_prompt_tokens} prompt tokens is cached to follow the cache, and"
        f" {decision.replica} mostly decodes, so it has compute to spare for a prefill; costs were not compared."
    )


def _redirect(decision: Decision) -> str:
    heavy = next((c for c in decision.candidates if c.replica != decision.replica), None)
    holder = f"{heavy.replica}, which caches {heavy.matched_tokens} tokens of it," if heavy else "its holder"
    return (
        f"Its prefix is on {holder} but that replica is much more loaded than {decision.replica}, the lightest:"
        " waiting there would cost more than computing the prefix again."
    )


def _replicate(decision: Decision) -> str:
    return (
        "Its prefix is in such demand that the scheduler replicates it; "
        f"{_cheapest(decision, 'that serve it')} It caches {decision.matched_tokens} tokens so far."
    )


def _policy(decision: Decision) -> str:
    return f"The rule of {decision.policy} chose it; costs were not compared."


_SENTENCES: Mapping[Reason, Callable[[Decision], str]] = MappingProxyType(
    {
        Reason.EXPLOIT: _exploit,
        Reason.EXPLORE: _explore,
        Reason.BALANCE: _balance,
        Reason.REDIRECT: _redirect,
        Reason.REPLICATE: _replicate,
        Reason.POLICY: _policy,
    }
)


def _by_delay(decision: Decision) -> str:
    """Return why the policy `preble` chose it: the request adds the least delay there, to all requests together."""
    if len(decision.candidates) == 1:
        return f"{_prompt(decision)}. {decision.replica} is the only one that could take it{_paired(decision)}."
    ties = _ties(decision)
    paired = decision.transfer is not None and decision.transfer.kind is TransferKind.PREFILL
    how = "with fewest requests in flight" if paired else "drawn by lot"
    who = f"one of {ties + 1}, {how}," if ties else "the one"
    where = (
        f"Of the {len(decision.candidates)} replicas {decision.replica} is {who} where it adds the least delay, "
        "to itself and to all others"
    )
    transfer = decision.transfer
    if transfer is not None and transfer.kind is TransferKind.PREFILL:
        where += _paired(decision)
        if any(candidate.ways is not None for candidate in decision.candidates):  # else its role is fixed
            where += (
                ", so that answers do not stand still meanwhile. Its sum alone has the standstill that awaits the "
                "answer; the ways below can be compared"
            )
    elif transfer is not None:
        where += (
            f"; {transfer.tokens} of the {decision.matched_tokens} cached tokens are copied there from "
            f"{transfer.source} first, in {transfer.seconds:.3f} s"
        )
    elif decision.reason is Reason.REPLICATE:
        where += f", although only {decision.matched_tokens} are cached there: the replica computes its prefix too"
    return f"{_prompt(decision)}. {where}."


def _paired(decision: Decision) -> str:
    """Return what another replica does for it, as the end of a sentence; nothing where it needs none."""
    transfer = decision.transfer
    if transfer is None or transfer.kind is not TransferKind.PREFILL:
        return ""
    return (
        f"; {transfer.source} computes the prompt and sends {transfer.tokens} tokens there, in {transfer.seconds:.3f} s"
    )


_RULES: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.EXPLOIT: "enough to follow the cache",
        Reason.EXPLORE: "too little to follow the cache",
        Reason.BALANCE: "but load is too uneven to follow the cache",
        Reason.REDIRECT: "but the replica that caches most of it is too loaded",
    }
)


def _has_scores(decision: Decision) -> bool:
    """Return whether the policy used scores of its own."""
    return any(c.score is not None for c in decision.candidates)


def _by_score(decision: Decision) -> str:
    cached = max(c.matched_tokens for c in decision.candidates)
    prompt = f"Of {decision.num_prompt_tokens} prompt tokens {cached} are cached at best where {decision.policy} looked"
    if rule := _RULES.get(decision.reason):
        prompt = f"{prompt}, {rule}"
    return f"{prompt}; {_lowest_score(decision)}"


def _lowest_score(decision: Decision) -> str:
    scores = {c.replica: c.score for c in decision.candidates if c.score is not None}
    lowest, own = min(scores.values()), scores.get(decision.replica)
    ties = sum(score == lowest for score in scores.values()) - 1
    if len(scores) == 1:
        return f"{decision.replica} is the only one weighed."
    if own != lowest:
        return f"{decision.replica} was taken, though its score is not the lowest of the {len(scores)} weighed."
    how = f"shares the lowest score with {ties}" if ties else "has the lowest score"
    return f"of the {len(scores)} weighed, {decision.replica} {how}."


def _untrusted(decision: Decision) -> Iterator[str]:
    if decision.untrusted:
        names = ", ".join(decision.untrusted)
        yield fill(f"Not trusted, so their caches did not count: {names}.", WIDTH)


_LOADED_HEAD = f"{'to load':>8} "
"""Of the cached tokens, those in the host's memory or in a store: loading them is part of what there is to compute."""
_COPIED_HEAD = f"{'to copy':>8} "
"""Of the cached tokens, those on another replica: waiting for them is part of what there is to compute."""
_COST_HEAD = f"{'L load':>11} {'M evict':>11} {'P prefill':>11} {'sum':>11}  (ms)"
_DELAY_HEAD = f"{'to wait':>11} {'to evict':>11} {'to compute':>11} {'sum':>11}  (ms)"
_OWN_HEAD = f"{'wait':>9} {'prefill':>9}  "
_OWN_LINE = f"{'its own time':>19}  {'delay of all requests, weighted':>43}"
"""What a watch shows of this request is not what the policy compares: that counts others and weighs the first token."""
_SCORE_HEAD = f"{'score':>14}  (lower is better)"


def _table(decision: Decision) -> Iterator[str]:
    """Yield the candidates, cheapest first: cached tokens, and costs in ms or the score."""
    scored = _has_scores(decision)
    if decision.reason is Reason.POLICY and not scored:
        yield f"  {decision.replica} had {decision.matched_tokens} tokens cached."
        return
    shown, width = _shown(decision)
    head = _SCORE_HEAD if scored else _DELAY_HEAD if decision.policy == LEAST_DELAY else _COST_HEAD
    loads, copies = any(c.loaded_tokens for c in shown), any(c.copied_tokens for c in shown)
    before = f"{'':8} " * (1 + loads + copies)
    extra = (_LOADED_HEAD if loads else "") + (_COPIED_HEAD if copies else "")
    own = ""
    if any(c.own_wait_s is not None for c in shown):
        own = _OWN_HEAD
        yield f"    {'':{width}} {before}{_OWN_LINE}"
    yield f"    {'replica':{width}} {'cached':>8} {extra}{own}{head}"
    for candidate in shown:
        yield _row(candidate, width, loads=loads, copies=copies, chosen=candidate.replica == decision.replica)
    if len(shown) < len(decision.candidates):
        yield f"    and {len(decision.candidates) - len(shown)} more that cost more"


def _shown(decision: Decision) -> tuple[list[CandidateCost], int]:
    """Return the candidates to show, cheapest first, and the width of their names' column."""
    ranked = sorted(decision.candidates, key=lambda c: c.cost_s if c.score is None else c.score)
    shown = [c for i, c in enumerate(ranked) if i < SHOWN_CANDIDATES or c.replica == decision.replica]
    return shown, max([len("replica"), *(len(c.replica) for c in shown)])


_WAYS = ("compute", "load", "copy", "split")


def _ways(decision: Decision) -> Iterator[str]:
    """Yield each candidate's sum for each way to the prompt's KV; nothing where none has more than one way."""
    shown, width = _shown(decision)
    sums = [(c, astuple(c.ways)) for c in shown if c.ways is not None]
    known = [i for i in range(1, len(_WAYS)) if any(of_one[i] is not None for _, of_one in sums)]
    if not known:
        return
    heads = " ".join(f"{_WAYS[i]:>11}" for i in (0, *known))
    yield f"    {'the sum, if it would':{width}} {heads}  (ms)"
    for candidate, of_one in sums:
        mark = "*" if candidate.replica == decision.replica else " "
        columns = " ".join(f"{'-' if of_one[i] is None else f'{1000 * of_one[i]:.1f}':>11}" for i in (0, *known))
        yield f"  {mark} {candidate.replica:{max(width, len('the sum, if it would'))}} {columns}"


def _row(candidate: CandidateCost, width: int, *, loads: bool, copies: bool, chosen: bool) -> str:
    costs = (candidate.load_s, candidate.eviction_s, candidate.prefill_s, candidate.cost_s)
    columns = " ".join(f"{1000 * seconds:11.1f}" for seconds in costs)
    if candidate.score is not None:
        columns = f"{candidate.score:14,.6g}"
    loaded = f"{candidate.loaded_tokens:8d} " if loads else ""
    loaded += f"{candidate.copied_tokens:8d} " if copies else ""
    own = ""
    if candidate.own_wait_s is not None and candidate.own_prefill_s is not None:
        own = f"{1000 * candidate.own_wait_s:9.1f} {1000 * candidate.own_prefill_s:9.1f}  "
    return (
        f"  {'*' if chosen else ' '} {candidate.replica:{width}} {candidate.matched_tokens:8d} {loaded}{own}{columns}"
    )


def _afterwards(decision: Decision) -> Iterator[str]:
    if decision.transferred_s is not None:
        how = "had failed" if decision.transfer_failed else "was there"
        is_copy = decision.transfer is None or decision.transfer.kind is TransferKind.COPY
        what = "copy" if is_copy else "prompt's KV"
        yield f"The {what} {how} after {decision.transferred_s:.3f} s."
    if decision.first_token_s is not None:
        expected = _predicted(decision.predicted_ttft_s, decision.predicted_ttft_p98_s)
        yield f"First token after {decision.first_token_s:.3f} s{expected}."
    if decision.replica_lost:
        yield f"{decision.replica} left the rotation meanwhile."
    if decision.end_s is None:
        yield "Not finished yet."
        return
    ended = "Finished" if decision.outcome == "ok" else f"Ended ({decision.outcome})"
    yield f"{ended} after {decision.end_s:.3f} s with {decision.output_tokens} output tokens."
    if decision.tpot_s is not None:
        expected = _predicted(decision.predicted_tpot_s, decision.predicted_tpot_p98_s)
        yield f"A further token every {decision.tpot_s:.3f} s{expected}."
    if decision.cached_tokens is not None:
        yield _cached(decision.cached_tokens, decision.matched_tokens)


def _predicted(seconds: float | None, p98_s: float | None) -> str:
    said = "" if seconds is None else f"; {seconds:.3f} s were predicted"
    return said if p98_s is None else f"{said}, {p98_s:.3f} s for 98 of 100"


def _cached(reported: int, predicted: int) -> str:
    if reported == predicted:
        return f"The replica reported {reported} tokens cached, as predicted."
    how = "more" if reported > predicted else "fewer"
    return f"The replica reported {reported} tokens cached, {abs(reported - predicted)} {how} than predicted."
