"""The least that work can cost on a replica, whatever shares a batch with it."""

from __future__ import annotations

import numpy as np

from preble.core.costs.model import CostModel
from preble.lab.sim.config import SimConfig


class LeastCosts:
    """Seconds that no schedule undercuts, of `config`'s replicas.

    `token_s`: an iteration with t new tokens, of prompts and decodes together, takes at least t x `token_s`, for it has
    at most `max_batch_tokens`, and this is its length over t where that is least.
    """

    def __init__(self, config: SimConfig) -> None:
        self._model = CostModel(config.profile)
        self._budget = config.max_batch_tokens
        tokens = np.arange(1, self._budget + 1)
        seconds = np.array([self._model.prefill_s(int(n)) for n in tokens])
        self.token_s = float((seconds / tokens).min())

    def compute_s(self, start: int, end: int) -> float:
        """Return seconds of GPU time that the tokens of a prompt from `start` to `end` take at least.

        The token at position p is in a chunk that begins at most `max_batch_tokens` before it, and attends to all
        tokens before that chunk.
        """
        first, last = (max(place - self._budget, 0) for place in (start, end))
        pairs = (last * (last - 1) - first * (first - 1)) / 2
        return (end - start) * self.token_s + pairs * self._model.profile.attention_s_per_pair

    def decode_s(self, num_prompt_tokens: int, output_tokens: int) -> float:
        """Return seconds from the first token to the last, on a replica that does nothing else.

        Each token takes an iteration that decodes. If the request was preempted before it, then two: one that decodes
        others, in which it lost its place, and one that computes at least one token again.
        """
        context = np.arange(num_prompt_tokens, num_prompt_tokens + output_tokens - 1)
        alone_s = self._model.iteration_s((), 1, 0)
        attention = np.minimum(context * self._model.profile.decode_s_per_context_token, self._model.prefill_s(1))
        return len(context) * alone_s + float(attention.sum())

    def decode_work_s(self, num_prompt_tokens: int, output_tokens: int) -> float:
        """Return seconds of GPU time that the tokens after the first add to the iterations they are made in.

        Each is a token of its iteration and has its own attention. After a preemption it is the last of a chunk of n
        tokens that follow c others: n - 1 more tokens, and context for all of them. As this is concave in n, it is
        least for a single token or for all.
        """
        profile = self._model.profile
        context = np.arange(num_prompt_tokens, num_prompt_tokens + output_tokens - 1)
        decoding = profile.decode_s_per_sequence + profile.decode_s_per_context_token * context
        attention_s = profile.attention_s_per_pair + profile.attention_s_per_context_token
        again = min(attention_s, self.token_s) * context
        return len(context) * self.token_s + float(np.minimum(decoding, again).sum())
