"""Which requests of a workload share what, and which can have been first: one tree over all prompts and answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from preble.core.prefixes.radix_tree import Node, RadixTree
from preble.core.types import TOKEN_BYTES, PackedTokens
from preble.lab.sim.bound.least_costs import LeastCosts
from preble.lab.sim.config import SimConfig
from preble.lab.sim.script import Script
from preble.lab.workloads import Workload, WorkloadRequest


@dataclass(eq=False, frozen=True, slots=True)
class Job:
    """A request that can be played.

    `index`: its number, parents before children; those that wait for it, directly or not, are `index` + 1 ... `last`.
    `sent_s`: the earliest time at which it can be sent; an opener is sent then. `end`, `answer_end`: the nodes that its
    prompt ends with, and the part of its answer that gets cached, which is all but the last token.
    """

    request: WorkloadRequest
    index: int
    last: int
    sent_s: float
    end: Node
    answer_end: Node

    @property
    def is_opener(self) -> bool:
        return self.request.parent is None

    @property
    def num_tokens(self) -> int:
        """Of its prompt."""
        return self.end.end


@dataclass(slots=True)
class _Users:
    """The requests whose prompts go through a node.

    `first`: the least (earliest time of sending, index) of them. `low`, `high`: the least and the highest index.
    `is_answer`: a request's answer goes through it, too.
    """

    first: tuple[float, int] = (inf, 0)
    low: float = inf
    high: float = -inf
    is_answer: bool = False

    def add(self, job: Job) -> None:
        self.first = min(self.first, (job.sent_s, job.index))
        self.low = min(self.low, job.index)
        self.high = max(self.high, job.index)


class Sharing:
    """The requests of a workload and the tree of their prompts and answers.

    `jobs`: all requests but those that no replica can hold, and those that wait for such a one; in the workload's
    order. `prompt_tokens`: that are distinct, and in no answer.
    """

    def __init__(self, workload: Workload, config: SimConfig, costs: LeastCosts) -> None:
        """O(tokens)."""
        self._tree = RadixTree()
        self._users: dict[Node, _Users] = {}
        self.jobs = self._insert(workload, config, costs)
        for job in self.jobs:
            for node in job.end.ancestors():
                self._users.setdefault(node, _Users()).add(job)
        for job in self.jobs:
            self._note_answer(job)
        self.prompt_tokens = sum(node.num_tokens for node, users in self._users.items() if not users.is_answer)

    def is_answered(self, node: Node) -> bool:
        """Return whether the node is a part of somebody's answer, so that nobody computes it as a prompt first."""
        return self._users[node].is_answer

    def seen_tokens(self, job: Job, *, with_ties: bool) -> int:
        """Return leading tokens of its prompt that a replica may have computed before it is sent; all others are its
        own.

        Of an opener: what prompts have that can be sent earlier. Of any other request, whose time is not known: what
        prompts have but those that wait for it. And what is answered by anybody. `with_ties`: what several requests
        share that are sent in one instant is seen by all of them but one. O(depth).
        """
        since = (job.sent_s, job.index if with_ties else 0)
        seen = job.num_tokens
        for node in job.end.ancestors():
            users = self._users[node]
            is_first = job.is_opener and users.first >= since
            is_alone = job.index <= users.low and users.high <= job.last
            if users.is_answer or not (is_first or is_alone):
                break
            seen = node.start
        return seen

    def _insert(self, workload: Workload, config: SimConfig, costs: LeastCosts) -> list[Job]:
        script = Script(workload)
        numbers = _numbers(workload.requests)
        jobs: dict[str, Job] = {}
        for request, prompt in _playable(workload, script, config):
            answer = script.answer(request, prompt)
            sent_s = request.arrival_s or 0.0
            if request.parent is not None:
                parent = jobs[request.parent]
                took_s = config.dispatch_s + costs.decode_s(parent.num_tokens, parent.request.output_tokens)
                sent_s = max(sent_s, parent.sent_s + took_s + request.delay_s)
            end = self._tree.insert(prompt)[-1]
            answer_end = self._tree.insert(prompt + answer[:-TOKEN_BYTES])[-1]
            jobs[request.request_id] = Job(request, *numbers[request.request_id], sent_s, end, answer_end)
        return list(jobs.values())

    def _note_answer(self, job: Job) -> None:
        for node in job.answer_end.ancestors():
            if node.end <= job.num_tokens:
                return
            if node in self._users:
                self._users[node].is_answer = True


def _playable(workload: Workload, script: Script, config: SimConfig) -> Iterator[tuple[WorkloadRequest, PackedTokens]]:
    """Yield the requests that do not fail where no replica is lost, each with its prompt."""
    known: set[str | None] = {None}
    most_blocks = max([config.num_blocks, *(config.blocks_of(replica) for replica in config.kv_shares)])
    for request in workload.requests:
        prompt = script.take_prompt(request)
        # The last token is never computed: nothing follows it.
        num_tokens = len(prompt) // TOKEN_BYTES + request.output_tokens - 1
        fits = num_tokens <= most_blocks * config.block_size
        if fits and prompt and request.output_tokens and request.parent in known:
            known.add(request.request_id)
            yield request, prompt


def _numbers(requests: Sequence[WorkloadRequest]) -> dict[str, tuple[int, int]]:
    """Request id -> its index and that of the last one which waits for it; parents come first in `requests`."""
    sizes = {request.request_id: 1 for request in requests}
    for request in reversed(requests):
        if request.parent is not None:
            sizes[request.parent] += sizes[request.request_id]
    numbers: dict[str, tuple[int, int]] = {}
    free: dict[str | None, int] = {None: 0}
    for request in requests:
        index = free[request.parent]
        free[request.parent] = free_after = index + sizes[request.request_id]
        free[request.request_id] = index + 1
        numbers[request.request_id] = (index, free_after - 1)
    return numbers
