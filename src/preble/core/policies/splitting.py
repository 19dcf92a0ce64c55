"""A split, in the same seconds of delay as all else: one replica computes the prompt, another one decodes the answer.

A split may take the place of what the policy chose without it, on replica c. With the signs of `preble`, and

- H_i the part of P_i for which nobody on i stands still: an iteration of decodes computes a few tokens for nothing,
- F_i = o t a / (1 - a) the standstill that awaits the answer on i: it decodes o tokens, one in t seconds, and of late
  answers there stood still for the share a of the time, which counts `_TO_COME` times,
- T the seconds from the source's first token to the KV's arrival, other transfers included,

a split from s to t adds what the prompt adds on s without a place among the answers there, and what the answer adds on
t without the prompt. It has its first token T and an iteration of t later:

    [all of s but the decoding, less N_s H_s] + [the decoding on t, and M_t] + F_t + v (T + t)

It must cost less than c does, which is cost_c + F_c - N_c H_c. F is what lets replicas take roles: where all are alike
a split gains nothing. But the fewer answers decode where prompts are computed, the less these hold up; and the fewer
prompts are computed where answers decode, the sooner these end. So replicas take roles, as the load asks for them.

Roles that exist make themselves look good: where prompts are computed nobody wants to decode. So a split must also cost
less than c would if prompts and answers were spread evenly, with the mean N, a and t, and the shortest queue. That
compares two ways to serve all requests. Whom a prompt holds up pays for it, and so does its answer for other prompts:
summed up over all requests both are the same seconds. So there all but the wait for the first token counts half. By the
full sum, half of the requests were split over a link that was slower than computing, and gained nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from preble.core.cluster.links import PrefixCopy
from preble.core.policies.transfers import TransferOptions
from preble.core.policies.view import ClusterView
from preble.core.types import Candidate

_TO_COME: Final = 1.5
"""How many times the standstill of late we expect. With 1, more prompts stay among answers and the p99 of the gaps
between tokens shows them; with 3, decoding is crowded onto fewer replicas than it need be."""
_MOST: Final = 0.9
"""No answer stands still for a larger share of the time: prompts that take more wait."""


class Splits:
    """What splits of one request cost. `candidates`: what each of `view.replicas` costs without, in their order.

    `ttft_value`: v. `best` is O(replicas x depth). After it `comparable_s` has what a split to each of them costs, None
    where there is none: less than `chosen` if and only if it would be better, by the stricter of its two comparisons.
    """

    def __init__(
        self, view: ClusterView, transfers: TransferOptions, candidates: Sequence[Candidate], ttft_value: float
    ) -> None:
        self._view, self._transfers, self._candidates, self._ttft_value = view, transfers, candidates, ttft_value
        replicas, waiting_s, num_requests = view.replicas, view.waiting_prefill_s, view.num_requests
        self._waiting_s = [waiting_s[replica] for replica in replicas]
        self._num_requests = [num_requests[replica] for replica in replicas]
        self.comparable_s: list[float | None] = [None] * len(replicas)
        self._expected_tokens = view.expected_output_tokens
        self._step_s = [view.tpot_s(replica) for replica in replicas]
        self._together_s = [
            candidate.load_s - ttft_value * waiting_s
            for candidate, waiting_s in zip(candidates, self._waiting_s, strict=True)
        ]

    def best(self, chosen: int, chosen_s: float) -> tuple[PrefixCopy, int, Candidate] | None:
        """Return the split that costs least, the position of its target and what it costs; None if `chosen` is as good.

        `chosen_s`: what that costs as it is.
        """
        share = self._transfers.standstill(self._view.replicas[chosen])
        least_s = chosen_s + self._to_come_s(self._step_s[chosen], share)
        least_s -= self._unnoticed_s(chosen, self._num_requests[chosen])
        added_s, even_s = least_s - chosen_s, self._even_s(chosen)
        found: tuple[PrefixCopy, int, Candidate] | None = None
        for members in self._transfers.splitting:
            sources = sorted((self._source_s(i), i) for i in members)[:2]
            for i in members:
                source = next((one for one in sources if one[1] != i), None)
                if source is None:
                    continue
                own_s = self._waiting_s[source[1]] + (self._candidates[source[1]].own_prefill_s or 0.0)
                split = self._transfers.split(source[1], i, own_s)
                if split is None:
                    continue
                candidate = self._candidate(i, split, own_s, source[0])
                evenly_s = candidate.cost_s + self._ttft_s(candidate) - even_s
                self.comparable_s[i] = max(candidate.cost_s - added_s, chosen_s + evenly_s)
                if candidate.cost_s < least_s and evenly_s < 0.0:
                    least_s, found = candidate.cost_s, (split, i, candidate)
        return found

    def _source_s(self, i: int) -> float:
        """Return what the prompt adds on i, where its answer does not decode."""
        candidate = self._candidates[i]
        added_s = candidate.load_s - self._together_s[i] + candidate.prefill_s + candidate.eviction_s
        return added_s - self._unnoticed_s(i, self._num_requests[i])

    def _candidate(self, i: int, split: PrefixCopy, own_s: float, source_s: float) -> Candidate:
        """Return what it costs if i decodes the answer. Elsewhere the prompt is computed in `own_s`, its wait
        included, and adds `source_s`.
        """
        ready_s = max(split.seconds, self._waiting_s[i])
        to_come_s = self._to_come_s(self._step_s[i], self._transfers.standstill(self._view.replicas[i]))
        return Candidate(
            self._candidates[i].replica_id,
            split.matched_tokens,
            self._together_s[i] + to_come_s,
            self._candidates[i].eviction_s,
            source_s + self._ttft_value * (ready_s - own_s + self._step_s[i]),
            own_wait_s=ready_s,
            own_prefill_s=self._step_s[i],
            copied_tokens=split.tokens,
            copy_s=split.seconds,
        )

    def _even_s(self, chosen: int) -> float:
        """Return what `chosen` would cost if prompts and answers were spread evenly, its first token twice."""
        number = len(self._candidates)
        mean = sum(self._num_requests) // number
        candidate = self._candidates[chosen]
        own_s, waiting_s = candidate.own_prefill_s or 0.0, min(self._waiting_s, default=inf)
        added_s = candidate.prefill_s + (mean - self._num_requests[chosen]) * own_s
        added_s += candidate.eviction_s - self._unnoticed_s(chosen, mean)
        decoding_s = sum(self._together_s) / number
        to_come_s = self._to_come_s(sum(self._step_s) / number, self._transfers.even_standstill())
        return self._ttft_value * (2.0 * waiting_s + own_s) + added_s + decoding_s + to_come_s

    def _ttft_s(self, candidate: Candidate) -> float:
        """Return what the wait for the first token costs, which is a part of the candidate's cost."""
        return self._ttft_value * ((candidate.own_wait_s or 0.0) + (candidate.own_prefill_s or 0.0))

    def _unnoticed_s(self, i: int, answers: int) -> float:
        """Return the seconds for which these answers do not stand still, of all those that computing on i takes."""
        tokens = self._candidates[i].matched_tokens
        new_tokens, model = self._view.request.num_prompt_tokens - tokens, self._view.cost_model
        stands_still_s = model.standstill_s(new_tokens, tokens, answers)
        return answers * max(model.prefill_s(new_tokens, tokens) - stands_still_s, 0.0)

    def _to_come_s(self, step_s: float, share: float) -> float:
        share = min(_TO_COME * share, _MOST)
        return self._expected_tokens * step_s * share / (1.0 - share)
