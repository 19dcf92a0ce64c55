"""Which requests of a workload share what, and which can have been first: one tree over all prompts and answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from preble.core.prefixes.radix_tree import Node, RadixTree
from preble.core.types import TOKEN_BYTES, PackedTokens
from preble.lab.sim.bound.least_costs import LeastCosts
from preble.lab.sim.config import SimConfig
from preble.lab.sim.script import Script
from preble.lab.workloads import Workload, WorkloadRequest


@dataclass(eq=False, frozen=True, slots=True)
class Job:
    """A request that can be played.

    `sent_s`: the earliest time at which it can be sent; one that waits for no other is sent then. `end`, `answer_end`:
    the nodes that its prompt ends with, and the part of its answer that gets cached, which is all but the last token.
    """

    request: WorkloadRequest
    sent_s: float
    end: Node
    answer_end: Node

    @property
    def num_tokens(self) -> int:
        """Of its prompt."""
        return self.end.end


class Sharing:
    """The requests of a workload and the tree of their prompts and answers.

    `jobs`: all requests but those that no replica can hold, and those that wait for such a one; in the workload's
    order.
    """

    def __init__(self, workload: Workload, config: SimConfig, costs: LeastCosts) -> None:
        """O(tokens)."""
        self._tree = RadixTree()
        self.jobs = self._insert(workload, config, costs)
        self._answers = {node for job in self.jobs for node in _answer_nodes(job)}

    def is_answered(self, node: Node) -> bool:
        """Return whether the node is a part of somebody's answer, so that nobody computes it as a prompt first."""
        return node in self._answers

    def _insert(self, workload: Workload, config: SimConfig, costs: LeastCosts) -> list[Job]:
        script = Script(workload)
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
            jobs[request.request_id] = Job(request, sent_s, end, answer_end)
        return list(jobs.values())


def _answer_nodes(job: Job) -> Iterator[Node]:
    """Yield the nodes of the tree that the job's answer goes through."""
    return takewhile(lambda node: node.end > job.num_tokens, job.answer_end.ancestors())


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
