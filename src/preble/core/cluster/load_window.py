"""The work placed on each replica in the last H seconds, in seconds of GPU time: L of Algorithm 2.

L_i = sum over the requests placed on i in H of
      prefill_s(tokens missed when placed) + decode_s(mean output length in H, prompt length).
The output length is the mean over all replicas. Among those that a replica has finished short answers are too many, the
more so the more requests it has: by its own mean a busy replica looks lighter than it is (docs/decisions/0001).
Kept incrementally: O(1) a request, its end and its expiry. L itself is computed when asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from math import exp, inf, log
from typing import Final

from preble.core.costs.model import CostModel
from preble.core.prefixes.radix_tree import Node
from preble.core.replica_index import ReplicaIndex
from preble.core.types import RequestId

DEFAULT_OUTPUT_TOKENS: Final = 45.0
"""Assumed output length before any request has finished. Source: the published code's default."""


class WindowEntry:
    """One request in the window. `replica`: None once it counts no more. `counts_use`: as a use of its prefix, too.

    `later`: the one that was placed next.
    """

    __slots__ = ("counts_use", "later", "leaf", "num_prompt_tokens", "placed_at", "prefill_s", "replica")

    def __init__(
        self, replica: ReplicaIndex, placed_at: float, prefill_s: float, num_prompt_tokens: int, leaf: Node
    ) -> None:
        self.replica: ReplicaIndex | None = replica
        self.placed_at = placed_at
        self.prefill_s = prefill_s
        self.num_prompt_tokens = num_prompt_tokens
        self.leaf = leaf
        self.counts_use = True
        self.later: WindowEntry | None = None


class LoadWindow:
    """Work placed on each replica within the last `window_s` seconds. Lists are by replica index, for reading only.

    `num_requests`: requests in the window; `num_placed`: those on all replicas. `mean_output_tokens`: mean output
    length seen there in the window; where no request finished, that of all replicas when the replica's sums last
    changed, or the default. `next_expiry`: when the oldest entry leaves the window, infinity if it is empty.
    `mean_answer_tokens`: mean output length of all replicas, the default where no request finished. `answer_tokens`:
    that default, if it is known better.
    """

    def __init__(self, cost_model: CostModel, window_s: float = 180.0, answer_tokens: float | None = None) -> None:
        if window_s <= 0:
            raise ValueError(f"window_s must be positive, got {window_s}")
        self.window_s = window_s
        self.num_requests: list[int] = []
        self.num_placed = 0
        self.mean_output_tokens: list[float] = []
        self.next_expiry = inf
        self._cost_model = cost_model
        self._load_s: list[float] = []
        self._decode_load_s: list[float] = []
        self._is_current = False
        self._prefill_s: list[float] = []
        self._prompt_tokens: list[int] = []
        self._num_finished: list[int] = []
        self._output_tokens: list[int] = []
        self._oldest: WindowEntry | None = None
        self._newest: WindowEntry | None = None
        self._oldest_use: WindowEntry | None = None
        self._finished: deque[tuple[float, ReplicaIndex, int]] = deque()
        self._all_output_tokens = 0
        self._default_tokens = DEFAULT_OUTPUT_TOKENS if answer_tokens is None else answer_tokens
        self.mean_answer_tokens = self._default_tokens
        self._log_tokens = 0.0
        self._began_at: float | None = None

    def use(self, cost_model: CostModel) -> None:
        """Compute costs with another model from now on.

        Decode times of the requests in the window change with it; prefills keep the seconds they were added with.
        """
        self._cost_model = cost_model
        self._is_current = False

    @property
    def load_s(self) -> list[float]:
        """L. O(replicas) if it has changed."""
        if not self._is_current:
            self._compute_loads()
        return self._load_s

    @property
    def decode_load_s(self) -> list[float]:
        """The decode part of L. O(replicas) if it has changed."""
        if not self._is_current:
            self._compute_loads()
        return self._decode_load_s

    def add_replica(self, replica: ReplicaIndex) -> None:
        """Count for a replica from now on. An earlier one of this index must have been removed."""
        if replica == len(self.num_requests):
            for sums in (self.mean_output_tokens, self._prefill_s):
                sums.append(0.0)
            for counts in (
                self.num_requests,
                self._prompt_tokens,
                self._num_finished,
                self._output_tokens,
            ):
                counts.append(0)
        self._update(replica)

    def remove_replica(self, replica: ReplicaIndex) -> None:
        """Forget everything about the replica. O(requests in the window)."""
        for entry in self._placed():
            if entry.replica == replica:
                entry.replica = None
                self._log_tokens -= log(max(entry.num_prompt_tokens, 1))
        self._finished = deque(item for item in self._finished if item[1] != replica)
        self._find_next_expiry()
        self._all_output_tokens -= self._output_tokens[replica]
        self.num_placed -= self.num_requests[replica]
        self.num_requests[replica] = self._prompt_tokens[replica] = 0
        self._num_finished[replica] = self._output_tokens[replica] = 0
        self._prefill_s[replica] = 0.0
        self._update(replica)

    def add(
        self, replica: ReplicaIndex, now: float, prefill_s: float, num_prompt_tokens: int, leaf: Node
    ) -> WindowEntry:
        """Count a request that is placed now. `prefill_s`: of what it misses. `leaf`: where its prompt ends."""
        if self._began_at is None:
            self._began_at = now
        entry = WindowEntry(replica, now, prefill_s, num_prompt_tokens, leaf)
        if self.next_expiry == inf:
            self.next_expiry = now + self.window_s
        if self._newest is None:
            self._oldest = entry
        else:
            self._newest.later = entry
        self._newest = entry
        if self._oldest_use is None:
            self._oldest_use = entry
        self.num_placed += 1
        self._log_tokens += log(max(num_prompt_tokens, 1))
        self.num_requests[replica] = self.num_requests[replica] + 1
        self._prefill_s[replica] = self._prefill_s[replica] + prefill_s
        self._prompt_tokens[replica] = self._prompt_tokens[replica] + num_prompt_tokens
        self._update(replica)
        return entry

    def cancel(self, entry: WindowEntry) -> bool:
        """Take back a request whose work was not done; False if it no longer counted."""
        replica = entry.replica
        if replica is None:
            return False
        entry.replica = None
        self.num_placed -= 1
        self._log_tokens -= log(max(entry.num_prompt_tokens, 1))
        self.num_requests[replica] -= 1
        self._prompt_tokens[replica] -= entry.num_prompt_tokens
        self._prefill_s[replica] = (
            max(self._prefill_s[replica] - entry.prefill_s, 0.0) if self.num_requests[replica] else 0.0
        )
        self._update(replica)
        return True

    def correct(self, entry: WindowEntry, prefill_s: float) -> None:
        """The prefill of a request takes another time than was expected when it was placed."""
        replica = entry.replica
        if replica is not None:
            self._prefill_s[replica] = max(self._prefill_s[replica] + prefill_s - entry.prefill_s, 0.0)
            self._update(replica)
        entry.prefill_s = prefill_s

    def requests_per_s(self, now: float, num_placed: int) -> float:
        """Return the mean rate of requests of which `num_placed` were placed in the window.

        Over the time since the first request where that is shorter than the window, though a second at least.
        """
        return 0.0 if self._began_at is None else num_placed / min(max(now - self._began_at, 1.0), self.window_s)

    def finish(self, replica: ReplicaIndex, now: float, output_tokens: int) -> None:
        """Note the output length of a request that ended on the replica."""
        if self.next_expiry == inf:
            self.next_expiry = now + self.window_s
        self._finished.append((now, replica, output_tokens))
        self._update(replica, 1, output_tokens)

    def expire(self, now: float) -> list[tuple[ReplicaIndex, Node]]:
        """Drop what is older than the window, once it is `next_expiry`; returns (replica, leaf) of each use dropped.

        Amortised O(1).
        """
        dropped: list[tuple[ReplicaIndex, Node]] = []
        while (entry := self._oldest) is not None and entry.placed_at + self.window_s <= now:
            self._oldest = entry.later
            replica = entry.replica
            if self.cancel(entry) and replica is not None and entry.counts_use:
                dropped.append((replica, entry.leaf))
        if self._oldest is None:
            self._newest = None
        self._skip_forgotten()
        while self._finished and self._finished[0][0] + self.window_s <= now:
            _, replica, output_tokens = self._finished.popleft()
            self._update(replica, -1, -output_tokens)
        self._find_next_expiry()
        return dropped

    @property
    def typical_prompt_tokens(self) -> float:
        """Geometric mean of the prompts' lengths in the window, on all replicas; 0 where there was none."""
        return exp(self._log_tokens / self.num_placed) if self.num_placed else 0.0

    @property
    def oldest_use_s(self) -> float:
        """When the oldest request that counts as a use of its prefix was placed; infinity if there is none."""
        self._skip_forgotten()
        return inf if self._oldest_use is None else self._oldest_use.placed_at

    def drop_oldest_use(self) -> tuple[ReplicaIndex, Node]:
        """Stop counting the oldest request as a use of its prefix, but not as load; returns (replica, leaf)."""
        self._skip_forgotten()
        entry = self._oldest_use
        assert entry is not None and entry.replica is not None
        entry.counts_use = False
        return entry.replica, entry.leaf

    def _skip_forgotten(self) -> None:
        while (entry := self._oldest_use) is not None and (entry.replica is None or not entry.counts_use):
            self._oldest_use = entry.later

    def load_below(self, node: Node) -> dict[Node, float]:
        """L of the requests that pass each child of `node`.

        O(requests in the window x depth): for the moment at which a prefix is replicated.
        """
        load_s: dict[Node, float] = {}
        for entry in self._placed():
            above = entry.leaf
            while above.parent is not None and above.parent is not node and above.start > node.end:
                above = above.parent
            if entry.replica is not None and entry.counts_use and above.parent is node:
                decode_s = self._cost_model.decode_s(self.mean_answer_tokens, entry.num_prompt_tokens)
                load_s[above] = load_s.get(above, 0.0) + entry.prefill_s + decode_s
        return load_s

    def last_users(self, placed: Mapping[float, RequestId]) -> dict[Node, RequestId]:
        """Return, for each node that requests of `placed` use, the last of them. `placed`: by the time of placement.

        One that shares its time with others is left out: a clock may stand still for a turn of the event loop, so
        nobody knows which it is. O(requests in the window + requests in `placed` x depth): for the live page.
        """
        users: dict[Node, RequestId] = {}
        before = -inf
        for entry in self._placed():
            shares_time = entry.placed_at == before or (
                entry.later is not None and entry.later.placed_at == entry.placed_at
            )
            before = entry.placed_at
            if shares_time or entry.replica is None:
                continue
            if (request_id := placed.get(entry.placed_at)) is not None:
                for node in entry.leaf.ancestors():
                    users[node] = request_id
        return users

    def entries(self) -> list[WindowEntry]:
        """Return what counts now, oldest first. O(n); for tests."""
        return [entry for entry in self._placed() if entry.replica is not None]

    def check(self) -> None:
        """Assert that the sums agree with the entries. O(n x replicas); for tests."""
        assert self.num_placed == sum(self.num_requests)
        assert abs(self._log_tokens - sum(log(max(entry.num_prompt_tokens, 1)) for entry in self.entries())) < 1e-6
        assert self._all_output_tokens == sum(tokens for _, _, tokens in self._finished)
        for replica in map(ReplicaIndex, range(len(self.num_requests))):
            mine = [entry for entry in self.entries() if entry.replica == replica]
            outputs = [tokens for _, where, tokens in self._finished if where == replica]
            assert self.num_requests[replica] == len(mine)
            assert self._prompt_tokens[replica] == sum(entry.num_prompt_tokens for entry in mine)
            assert abs(self._prefill_s[replica] - sum(entry.prefill_s for entry in mine)) < 1e-6
            assert (self._num_finished[replica], self._output_tokens[replica]) == (len(outputs), sum(outputs))
            answer = self.mean_answer_tokens
            decode_s = sum(self._cost_model.decode_s(answer, entry.num_prompt_tokens) for entry in mine)
            assert abs(self.load_s[replica] - self._prefill_s[replica] - decode_s) < 1e-6

    def _placed(self) -> Iterator[WindowEntry]:
        """Yield what was placed in the window, oldest first."""
        entry = self._oldest
        while entry is not None:
            yield entry
            entry = entry.later

    def _find_next_expiry(self) -> None:
        placed_at = inf if self._oldest is None else self._oldest.placed_at
        finished_at = self._finished[0][0] if self._finished else inf
        self.next_expiry = min(placed_at, finished_at) + self.window_s

    def _update(self, replica: ReplicaIndex, num_finished: int = 0, output_tokens: int = 0) -> None:
        """Update what is derived from the sums, of which a replica's have changed. O(1).

        `num_finished`, `output_tokens`: how many more answers count there, and their tokens; less than 0 for fewer.
        """
        if num_finished:
            self._num_finished[replica] = self._num_finished[replica] + num_finished
            self._output_tokens[replica] = self._output_tokens[replica] + output_tokens
            self._all_output_tokens += output_tokens
        if self._finished:
            self.mean_answer_tokens = self._all_output_tokens / len(self._finished)
        else:
            self.mean_answer_tokens = self._default_tokens
        if self._num_finished[replica]:
            mean = self._output_tokens[replica] / self._num_finished[replica]
        else:
            mean = self.mean_answer_tokens
        self.mean_output_tokens[replica] = mean
        self._is_current = False

    def _compute_loads(self) -> None:
        answer, tokens, prefill_s = self.mean_answer_tokens, self._prompt_tokens, self._prefill_s
        self._decode_load_s = [
            self._cost_model.decode_s(count * answer, tokens[i] / count) if count else 0.0
            for i, count in enumerate(self.num_requests)
        ]
        self._load_s = [prefill_s[i] + decode_s for i, decode_s in enumerate(self._decode_load_s)]
        self._is_current = True
