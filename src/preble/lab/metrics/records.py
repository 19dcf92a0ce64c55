"""The record of one request, and the times that follow from it."""

from __future__ import annotations

import msgspec

from preble.lab.metrics.itl import GapCounts


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request as the load generator or the simulator saw it.

    Times are in seconds since the start of the run. `scheduled_s`: when it was due; `sent_s`: when it was sent;
    `first_token_s`: when its first token arrived; `end_s`: when its last byte arrived, or when it failed.
    `cached_tokens`: prompt tokens from the engine's cache, None if not reported. `status`: the HTTP status, None if no
    answer came. `error`: why it failed; None if it succeeded. `gaps`: between its tokens, see `metrics.itl`.
    """

    request_id: str
    scheduled_s: float
    sent_s: float
    first_token_s: float | None = None
    end_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    replica: str | None = None
    reason: str | None = None
    status: int | None = None
    error: str | None = None
    gaps: GapCounts = {}

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token = first token − scheduled; None if no token came.

        Counted from the scheduled time, so that a generator that falls behind hides no waiting.

        >>> record = RequestRecord(request_id="a", scheduled_s=1.0, sent_s=1.25, first_token_s=1.5, end_s=2.5)
        >>> record.ttft_s
        0.5
        """
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        """End-to-end latency = end − scheduled.

        >>> RequestRecord(request_id="a", scheduled_s=1.0, sent_s=1.25, first_token_s=1.5, end_s=2.5).e2e_s
        1.5
        """
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first = (E2E − TTFT) / (output tokens − 1); None below two tokens.

        >>> first, end = 1.5, 2.5
        >>> RequestRecord(
        ...     request_id="a", scheduled_s=1.0, sent_s=1.0, first_token_s=first, end_s=end, output_tokens=5
        ... ).tpot_s
        0.25
        """
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def lag_s(self) -> float:
        """How late the generator was = sent − scheduled.

        >>> RequestRecord(request_id="a", scheduled_s=1.0, sent_s=1.25, end_s=2.5).lag_s
        0.25
        """
        return self.sent_s - self.scheduled_s

    @property
    def recomputed_tokens(self) -> int | None:
        """Prompt tokens that were computed = prompt − cached; None where the engine did not report its cache.

        >>> RequestRecord(
        ...     request_id="a", scheduled_s=0, sent_s=0, end_s=1, prompt_tokens=100, cached_tokens=96
        ... ).recomputed_tokens
        4
        """
        return None if self.cached_tokens is None else self.prompt_tokens - self.cached_tokens
