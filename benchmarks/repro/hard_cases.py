"""Where `preble` loses: random cases of a wide family under every rule, and cases that it once lost.

    python benchmarks/repro/hard_cases.py                            # the named cases, one seed
    python benchmarks/repro/hard_cases.py burst-40x30000 --seeds 3
    python benchmarks/repro/hard_cases.py burst-40x30000 --streams   # what each rule makes of each of its streams
    python benchmarks/repro/hard_cases.py --draw 100                 # cases 0 to 99 at random; --first 100: the next
    python benchmarks/repro/hard_cases.py --again                    # those drawn, other seeds, against the best rule
    python benchmarks/repro/hard_cases.py --worst                    # the worst of those drawn, more seeds, shrunk
    python benchmarks/repro/hard_cases.py --page                     # only fill in the page from the kept results

Each outcome is kept at once in benchmarks/results/hard_cases.json (`--into FILE`), with a digest of the policy. What is
kept is not played again. Where it is of another policy, `preble` alone plays again: so a change of the policy is judged
in minutes by the same commands.

A case has one to three streams of requests: prompts of 50 to 200,000 tokens, shared by few or many, whose popularity
stays, flips or renews itself; answers as long as chance or their prefix says; sessions that go on and branch; clients
that wait for each answer; bursts about something new. Its replicas may differ, join and be lost, and cache from a tenth
of the prefixes to all of them.

All rules play the same requests. A rule's run ends as soon as its sums of E2E and of TTFT are both above the best so
far. A ratio is `preble`'s mean / that of the best other rule, or of least load: above 1 is worse. The best of many
rules is partly chance, so the worst cases are played again with other seeds. Then they are shrunk: whatever can be left
out, halved or evened is, as long as the case stays lost. The same numbers give the same cases and ratios.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from math import inf
from pathlib import Path
from statistics import fmean, median

import msgspec
from hard_family import NAMED, PROFILE, TOOLS, Case, drawn
from made_by import commit, policy_digest
from page import filled, markdown

from preble.core.policies.policy import Policy
from preble.core.policies.registry import make_policy, policy_names
from preble.errors import ConfigError
from preble.lab.metrics.summary import percentile
from preble.lab.report import Table
from preble.lab.sim import simulate
from preble.lab.sim.memory import fewer_collections
from preble.lab.sim.watch import Glimpse
from preble.lab.workloads import Workload

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "hard_cases.json"
UNSEEN = ROOT / "benchmarks" / "results" / "hard_cases.unseen.json"
"""Cases drawn after the policy was chosen: nothing that was tried on them is in it. `--draw` and `--into` add to it."""
PAGE = ROOT / "docs" / "evaluation.md"
FIRST = ("preble", "least_load", "sticky_until_saturated", "slim_router", "lmetric", "llmd_blend", "dynamo_kv")
"""The rules that are best most often play first, so that the others' runs end early."""
ABLATION = ("e2_per_request", "e2_rebalance")
RULES = tuple(dict.fromkeys((*FIRST, *(name for name in policy_names() if name not in ABLATION))))
FAR = 4.0
"""Least load's run ends once its sums are this many times those of `preble`. Then its ratio counts as 1 / this."""
LOST = 1.05
"""A ratio from which a case counts as lost."""
AGAIN = 2
"""Other seeds with which each drawn case is played again."""
KEPT = 10
TRIES = 12
"""Smaller cases that are played at most."""
NUMBERS = {"mean E2E": "e2e_s", "mean TTFT": "ttft_s"}


# -- playing ----------------------------------------------------------------------------------------------------------


class Numbers(msgspec.Struct, frozen=True):
    """Means and p99 in seconds of what was sent after the warm-up, by stream and of all together (""); failures."""

    e2e_s: dict[str, float]
    ttft_s: dict[str, float]
    ttft_p99_s: dict[str, float]
    failed: int

    def kept(self) -> Numbers:
        """Return the numbers of all streams together, and of the tools beside others."""
        parts = (self.e2e_s, self.ttft_s, self.ttft_p99_s)
        return Numbers(
            *({one: round(its[one], 4) for one in ("", TOOLS.name) if one in its} for its in parts), self.failed
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the rules made of a case: by name, without those whose runs ended early. `policy`: `preble`'s digest."""

    case: str
    seed: int
    policy: str
    by_rule: dict[str, Numbers]

    def ratio(self, number: str, rule: str | None = None) -> float:
        """Return `preble`'s number / the lowest of any other rule, or of `rule`."""
        of = {name: getattr(its, number)[""] for name, its in self.by_rule.items()}
        if rule is not None:
            return float(of["preble"] / of[rule]) if rule in of else 1 / FAR
        return float(of["preble"] / of[self.best(number)])

    def best(self, number: str = "e2e_s") -> str:
        """Return the best other rule."""
        others = [name for name in self.by_rule if name != "preble"]
        return min(others, key=lambda name: (getattr(self.by_rule[name], number)[""], name))

    def worst(self) -> float:
        return max(self.ratio("e2e_s"), self.ratio("e2e_s", "least_load"))

    def essence(self) -> Outcome:
        """Return it without what no ratio needs."""
        needed = {"preble", "least_load", *(self.best(number) for number in NUMBERS.values())}
        by_rule = {name: its.kept() for name, its in self.by_rule.items() if name in needed}
        return msgspec.structs.replace(self, by_rule=by_rule)


class _Limits:
    """Ends a run when its sums are above both of these, of E2E and of TTFT."""

    every_s = 5.0

    def __init__(self, from_s: float, limits: tuple[float, float]) -> None:
        self._from_s, self._limits = from_s, limits
        self._seen, self._sums = 0, [0.0, 0.0]

    def has_seen_enough(self, glimpse: Glimpse) -> bool:
        for record in glimpse.records[self._seen :]:
            if record.scheduled_s >= self._from_s:
                self._sums[0] += record.e2e_s
                self._sums[1] += record.ttft_s or 0.0
        self._seen = len(glimpse.records)
        return self._sums[0] > self._limits[0] and self._sums[1] > self._limits[1]


def play(case: Case, workload: Workload, policy: Policy, seed: int, means: tuple[float, float]) -> Numbers | None:
    """Return what a rule makes of the case; None if its means of E2E and of TTFT are sure to be above these."""
    count = sum((request.arrival_s or inf) >= case.warm_s for request in workload.requests)
    with fewer_collections():
        watch = _Limits(case.warm_s, (means[0] * count, means[1] * count))
        result = simulate(case.config(seed), workload, policy=policy, watch=watch)
    if result.stopped_s is not None:
        return None
    stream_of = {request.request_id: request.group or "" for request in workload.requests}
    e2e: dict[str, list[float]] = {}
    ttft: dict[str, list[float]] = {}
    for record in result.records:
        if record.ok and record.scheduled_s >= case.warm_s:
            for name in ("", stream_of[record.request_id]):
                e2e.setdefault(name, []).append(record.e2e_s)
                ttft.setdefault(name, []).append(record.ttft_s or 0.0)
    return Numbers(
        {name: fmean(values) for name, values in e2e.items()},
        {name: fmean(values) for name, values in ttft.items()},
        {name: percentile(values, 99) for name, values in ttft.items()},
        sum(not record.ok for record in result.records),
    )


def outcome(name: str, case: Case, seed: int, rules: Sequence[str] = RULES, known: Outcome | None = None) -> Outcome:
    """Play the case under `preble` and these rules. `known`: what the others made of it."""
    workload = case.workload(seed)
    found = {} if known is None else dict(known.by_rule)
    found.pop("preble", None)
    own = play(case, workload, make_policy("preble"), seed, (inf, inf))
    assert own is not None
    for rule in rules if known is None else ():
        means = (inf, inf)
        if rule == "least_load":
            means = (FAR * own.e2e_s[""], FAR * own.ttft_s[""])
        elif found:
            means = (min(its.e2e_s[""] for its in found.values()), min(its.ttft_s[""] for its in found.values()))
        numbers = play(case, workload, make_policy(rule), seed, means) if rule != "preble" else None
        if numbers is not None:
            found[rule] = numbers
    return Outcome(case=name, seed=seed, policy=policy_digest(), by_rule={"preble": own, **found})


def case_of(name: str) -> Case:
    """Return the case with this name; `drawn-7` is the one with number 7."""
    return drawn(int(name.removeprefix("drawn-"))) if name.startswith("drawn-") else NAMED[name]


# -- shrinking --------------------------------------------------------------------------------------------------------


def loss(case: Case, seeds: tuple[int, ...], rules: Sequence[str] = RULES) -> float:
    """Return the mean over the seeds of `preble`'s mean E2E / the best rule's."""
    return fmean(outcome("", case, seed, rules).ratio("e2e_s") for seed in seeds)


def _smaller(case: Case) -> Iterator[Case]:
    """The case with one thing less each."""
    change = msgspec.structs.replace
    if len(case.streams) > 1:
        for i in range(len(case.streams)):
            yield change(case, streams=case.streams[:i] + case.streams[i + 1 :])
    if case.failures:
        joined = {failure.replica for failure in case.failures}
        yield change(case, failures=(), speeds={k: v for k, v in case.speeds.items() if k not in joined})
    if case.speeds:
        yield change(case, speeds={})
    if case.warm_s:
        yield change(case, warm_s=0.0)
    if case.kv_tokens is not None and case.kv_tokens < PROFILE.kv_capacity_tokens:
        yield change(case, kv_tokens=None)
    if all(stream.from_s < case.lasting_s / 2 for stream in case.streams):
        yield change(case, lasting_s=case.lasting_s / 2)
    evens = {"zipf": 0.0, "flip_s": None, "renew_s": None, "branches": 1, "turns": 1, "pause_s": 0.0}
    for i, stream in enumerate(case.streams):
        simpler = [{name: value} for name, value in evens.items() if getattr(stream, name) != value]
        if stream.long_every:
            simpler.append({"long_every": 0, "long_output_tokens": 0})
        for fields in simpler:
            yield change(case, streams=(*case.streams[:i], change(stream, **fields), *case.streams[i + 1 :]))


def shrunk(case: Case, seeds: tuple[int, ...], rules: Sequence[str], say: Callable[[str], None]) -> Case:
    """Return the smallest case found, in `TRIES`, that still loses at least half as much to these rules."""
    least = 1 + max(loss(case, seeds, rules) - 1, LOST - 1) / 2
    found, tries = True, 0
    while found:
        found = False
        for smaller in _smaller(case):
            if tries == TRIES:
                break
            tries += 1
            try:
                keeps = loss(smaller, seeds, rules) >= least
            except (ArithmeticError, ConfigError, KeyError, ValueError):  # nothing is left of it
                keeps = False
            if keeps:
                case, found = smaller, True
                say(f"  smaller: {msgspec.json.encode(case).decode()}")
                break
    return case


# -- what is kept -----------------------------------------------------------------------------------------------------


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A case that was among the worst of those drawn: mean E2E over the best rule with each seed, the best rule's mean
    E2E, and the smallest case found that loses like it."""

    case: str
    policy: str
    ratios: list[float]
    best: str
    best_s: list[float]
    smallest: Case


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """A drawn case with other seeds: the rule that was the best other one when it was drawn, `preble`'s mean E2E with
    each of these seeds, and that rule's."""

    case: str
    policy: str
    best: str
    own_s: list[float]
    best_s: list[float]

    def ratio(self) -> float:
        return sum(self.own_s) / sum(self.best_s)


class Result(msgspec.Struct, kw_only=True):
    """`commit`: on which the last outcome was made. `outcomes`: one for each case and seed."""

    commit: str = ""
    outcomes: list[Outcome] = []
    again: list[Again] = []
    worst: list[Kept] = []

    def drawn(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.case.startswith("drawn-")]

    def named(self, name: str) -> list[Outcome]:
        return [one for one in self.outcomes if one.case == name]

    def policies(self) -> set[str]:
        """Return the digests of all policies that it is of."""
        return {one.policy for one in (*self.outcomes, *self.again, *self.worst)}


def read_result(path: Path) -> Result:
    """Return what is kept there."""
    return msgspec.json.decode(path.read_bytes(), type=Result) if path.exists() else Result()


def _write(result: Result, path: Path) -> None:
    result.commit = commit()
    text = b'{\n "commit": %s,\n "outcomes": [\n  %s\n ],\n "again": [\n  %s\n ],\n "worst": [\n  %s\n ]\n}\n'
    lists = (b",\n  ".join(map(msgspec.json.encode, of)) for of in (result.outcomes, result.again, result.worst))
    new = path.with_suffix(".new")
    new.write_bytes(text % (msgspec.json.encode(result.commit), *lists))
    new.replace(path)


# -- the command ------------------------------------------------------------------------------------------------------

HEADER = f"{'case':22}seed  E2E, s    E2E   TTFT    p99  LL E2E   TTFT  best other"


def row(of: Outcome) -> str:
    preble = of.by_rule["preble"]
    return (
        f"{of.case:22}{of.seed:4} {preble.e2e_s['']:8.2f}{of.ratio('e2e_s'):7.3f}{of.ratio('ttft_s'):7.3f}"
        f"{preble.ttft_p99_s['']:7.2f}  {of.ratio('e2e_s', 'least_load'):6.3f}"
        f"{of.ratio('ttft_s', 'least_load'):7.3f}  {of.best()}" + (f"  failed {preble.failed}" if preble.failed else "")
    )


def _outcome(name: str, seed: int, known: Outcome | None) -> Outcome:
    return outcome(name, case_of(name), seed, known=known).essence()


def run(asked: list[tuple[str, int]], path: Path, jobs: int) -> None:
    """Play the cases with these names and seeds, as far as today's policy has not, and keep their outcomes."""
    result, today = read_result(path), policy_digest()
    places = {(one.case, one.seed): place for place, one in enumerate(result.outcomes)}
    known = {key: result.outcomes[place] for key, place in places.items()}
    print(HEADER)
    with ProcessPoolExecutor(jobs) as pool:
        missing = [key for key in asked if key not in known or known[key].policy != today]
        for done in as_completed([pool.submit(_outcome, *key, known.get(key)) for key in missing]):
            one = done.result()
            if (one.case, one.seed) in places:
                result.outcomes[places[one.case, one.seed]] = one
            else:
                result.outcomes.append(one)
            _write(result, path)
            print(row(one), flush=True)


def by_stream(name: str, seed: int) -> str:
    """Return what each rule makes of the case, its runs played to the end: a line a rule."""
    case = case_of(name)
    workload, lines = case.workload(seed), [f"{name}, seed {seed}: mean E2E, s, and p99 of TTFT by stream, s"]
    for rule in RULES:
        numbers = play(case, workload, make_policy(rule), seed, (inf, inf))
        assert numbers is not None, "nothing ends it early"
        p99 = ", ".join(f"{stream} {value:.2f}" for stream, value in numbers.ttft_p99_s.items() if stream)
        lines.append(f"{rule:24}{numbers.e2e_s['']:8.2f}  {p99}")
    return "\n".join(lines)


def _again(of: Outcome, before: Again | None) -> Again:
    case, best = case_of(of.case), of.best() if before is None else before.best
    means: dict[str, list[float]] = {"preble": [], best: []}
    for seed in (of.seed + 1000 * i for i in range(1, 1 + AGAIN)):
        workload = case.workload(seed)
        for rule in means if before is None else ("preble",):
            numbers = play(case, workload, make_policy(rule), seed, (inf, inf))
            assert numbers is not None, "nothing ends it early"
            means[rule].append(round(numbers.e2e_s[""], 4))
    best_s = means[best] if before is None else before.best_s
    return Again(case=of.case, policy=policy_digest(), best=best, own_s=means["preble"], best_s=best_s)


def again(path: Path, jobs: int) -> None:
    """Play the drawn cases with other seeds under `preble` and the rule that was the best other one, and keep it.

    That rule is not chosen anew: it was the best by chance in some cases, and will not be so again.
    """
    result, today = read_result(path), policy_digest()
    known = {one.case: one for one in result.again}
    with ProcessPoolExecutor(jobs) as pool:
        missing = [of for of in result.drawn() if of.case not in known or known[of.case].policy != today]
        for done in as_completed([pool.submit(_again, of, known.get(of.case)) for of in missing]):
            one = done.result()
            known[one.case] = one
            result.again = [known[of.case] for of in result.drawn() if of.case in known]
            _write(result, path)
            print(f"{one.case:22}{one.ratio():7.3f}  {one.best}", flush=True)


def closer(path: Path) -> None:
    """Play the worst of the drawn cases with more seeds, shrink those that stay lost, and keep them."""
    result, today = read_result(path), policy_digest()
    known = {one.case: one for one in result.worst}
    worst = [of for of in sorted(result.drawn(), key=lambda of: -of.worst())[:KEPT] if of.worst() >= LOST]
    for of in worst:
        before = known.get(of.case)
        if before is None or before.policy != today:
            known[of.case] = _closer(of, before)
            result.worst = list(known.values())
            _write(result, path)
    result.worst = [known[of.case] for of in worst]
    _write(result, path)


def _closer(of: Outcome, before: Kept | None) -> Kept:
    """Look closer at a case. `before`: what was kept of an earlier policy. Then `preble` alone plays again, and the
    smallest case stays as long as it is lost."""
    case, seeds = case_of(of.case), tuple(of.seed + 1000 * i for i in (1, 2, 3))
    again = [of, *(outcome(of.case, case, seed, RULES if before is None else ()) for seed in seeds)]
    best_s = [one.by_rule[one.best()].e2e_s[""] for one in again] if before is None else before.best_s
    ratios = [one.by_rule["preble"].e2e_s[""] / best for one, best in zip(again, best_s, strict=True)]
    print(f"{of.case}: {[round(ratio, 3) for ratio in ratios]} of {of.best()}", flush=True)
    smallest, rules = case if before is None else before.smallest, (of.best(),)
    if fmean(ratios) < LOST:
        smallest = case
    elif smallest == case or loss(smallest, seeds[:2], rules) < LOST:
        smallest = shrunk(case, seeds[:2], rules, lambda text: print(text, flush=True))
    return Kept(
        case=of.case,
        policy=policy_digest(),
        ratios=[round(ratio, 3) for ratio in ratios],
        best=of.best(),
        best_s=[round(best, 4) for best in best_s],
        smallest=smallest,
    )


# -- the page ---------------------------------------------------------------------------------------------------------


def spread(result: Result) -> str:
    """Return how the ratios of the drawn cases are distributed, as Markdown."""
    ratios = {
        f"{label} over {'the best other rule' if rule is None else 'least load'}": [
            one.ratio(number, rule) for one in result.drawn()
        ]
        for label, number in NUMBERS.items()
        for rule in (None, "least_load")
    }
    if result.again:
        ratios[f"mean E2E over the rule that was best, {AGAIN} other seeds"] = [one.ratio() for one in result.again]
    rows = [
        [name, *(f"{value:.2f}" for value in (percentile(of, 5), median(of), percentile(of, 95)))]
        for name, of in ratios.items()
    ]
    caption = f"{len(result.drawn())} cases; policy {', '.join(sorted(result.policies()))}, made on {result.commit}."
    return markdown(Table(("", "5 % are below", "half", "95 %"), rows, caption))


def winners(*results: Result) -> str:
    """Return in how many of the drawn cases of each result each rule has the lowest mean E2E, as Markdown."""
    counts = [
        Counter(min(one.by_rule, key=lambda name: one.by_rule[name].e2e_s[""]) for one in r.drawn()) for r in results
    ]
    rules = sorted(set().union(*counts), key=lambda name: ([-count[name] for count in counts], name))
    rows = [[f"`{name}`", *(str(count[name]) for count in counts)] for name in rules]
    return markdown(Table(("best rule", *(f"of {count.total()} cases" for count in counts)), rows))


def _burst_row(of: Outcome) -> tuple[str, ...]:
    best = of.best()
    ours, other = (of.by_rule[name].ttft_p99_s[TOOLS.name] for name in ("preble", best))
    return of.case, str(of.seed), f"{of.ratio('e2e_s'):.2f}", f"{ours / other:.2f}", f"{ours:.3g}", best


def tables(result: Result) -> dict[str, str]:
    """Return the page's tables by the name of their markers."""
    lost = [
        [one.case, f"{one.ratio('e2e_s'):.2f}", f"{one.ratio('e2e_s', 'least_load'):.2f}", one.best()]
        for one in sorted(result.drawn(), key=lambda one: -one.worst())
        if one.worst() > LOST
    ]
    again = [
        [one.case, f"{one.ratios[0]:.2f}", ", ".join(f"{ratio:.2f}" for ratio in one.ratios[1:]), one.best]
        for one in result.worst
    ]
    named = []
    for name in NAMED:
        if found := result.named(name):
            cells = [f"{fmean(one.ratio(number) for one in found):.2f}" for number in NUMBERS.values()]
            named.append([name, *cells, f"{fmean(one.ratio('e2e_s', 'least_load') for one in found):.2f}"])
    over = "mean E2E over the best other rule"
    return {
        "value:hard-rules": str(len(RULES) - 1),
        "hard-spread": spread(result),
        "hard-unseen": spread(read_result(UNSEEN)),
        "hard-winners": winners(result, read_result(UNSEEN)),
        "hard-lost": markdown(Table(("case", over, "over least load", "best other rule"), lost, "One seed a case.")),
        "hard-worst": markdown(Table(("case", "drawn", "with three other seeds", "best other rule"), again)),
        "hard-named": markdown(
            Table(("case", over, "mean TTFT over it", "mean E2E over least load"), named, "Means over the seeds.")
        ),
        "hard-bursts": markdown(
            Table(
                ("case", "seed", over, "p99 of the tools' TTFT over that rule's", "`preble`'s, s", "best other rule"),
                [_burst_row(one) for one in result.outcomes if one.case.startswith("burst-")],
            )
        ),
    }


def draw_page(result: Result) -> None:
    """Fill in the page's tables."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables(result)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(NAMED)}")
    parser.add_argument("--seeds", type=int, default=1, help="of the named cases")
    parser.add_argument("--streams", action="store_true", help="print the named cases' streams, and keep nothing")
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="N cases at random instead")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of the drawn cases")
    parser.add_argument("--again", action="store_true", help="play those drawn with other seeds against the best rule")
    parser.add_argument("--worst", action="store_true", help="look closer at the worst of those drawn")
    parser.add_argument("--page", action="store_true", help="fill in docs/evaluation.md from the kept results")
    parser.add_argument("--into", type=Path, default=RESULT, metavar="FILE", help="where outcomes are kept")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(NAMED):
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    if options.page:
        draw_page(read_result(options.into))
    elif options.again:
        again(options.into, options.jobs)
    elif options.worst:
        closer(options.into)
    elif options.draw:
        numbers = range(options.first, options.first + options.draw)
        run([(f"drawn-{number}", number) for number in numbers], options.into, options.jobs)
    else:
        asked = [(name, seed) for name in options.cases or list(NAMED) for seed in range(options.seeds)]
        if options.streams:
            for name, seed in asked:
                print(by_stream(name, seed), flush=True)
        else:
            run(asked, options.into, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
