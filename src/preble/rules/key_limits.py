"""What the holder of one key may ask for: requests and tokens a minute, and prompts at once."""

from __future__ import annotations

from collections import deque

from preble.errors import Overloaded, RequestError
from preble.rules.callers import Caller

_MINUTE_S = 60.0
_TOGETHER_S = 1.0
"""What a key uses elsewhere within this time is remembered as one use."""
MOST_KEYS = 10_000
"""The most keys of whose use elsewhere we remember anything: a peer could name any number."""


class _Allowance:
    """Up to `limit` at once, and as many a minute. It can be overdrawn: what a request costs is known afterwards."""

    def __init__(self, limit: int, now: float) -> None:
        self._limit = limit
        self._left = float(limit)
        self._at = now

    def left(self, now: float) -> float:
        self._left = min(self._left + (now - self._at) * self._limit / _MINUTE_S, float(self._limit))
        self._at = now
        return self._left

    def take(self, count: float, now: float) -> None:
        self._left = self.left(now) - count

    def take_elsewhere(self, count: float, now: float) -> None:
        """Do as `take`, by the word of somebody else: what is overdrawn is at most what a minute gives."""
        left = self.left(now)
        self._left = max(left - count, min(left, -float(self._limit)))

    def wait_s(self, count: float, now: float) -> float:
        """Return seconds until there is as much left."""
        return max(count - self.left(now), 0.0) * _MINUTE_S / self._limit


class KeyLimits:
    """What each key has used. Time is an argument, in seconds and never going back. O(1).

    In a group, the limits per minute hold for all gateways together, the limit of prompts at once for each.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, int] = {}
        self._untold: dict[str, list[int]] = {}
        self._elsewhere: dict[str, deque[tuple[float, int, int]]] = {}
        """By key: the requests and tokens that it used at other gateways within the last minute, and when."""
        self._requests: dict[tuple[str, int], _Allowance] = {}
        self._tokens: dict[tuple[str, int], _Allowance] = {}

    def admit(self, caller: Caller, num_prompts: int, now: float) -> None:
        """Count a request and its prompts; the caller gives the prompts back with `release`.

        Raises: Overloaded: the key has used up its limit. RequestError: the request alone exceeds the limit.
        """
        limits = caller.limits
        if limits is None:
            return
        at_once = self._prompts.get(caller.name, 0)
        if limits.prompts_at_once is not None:
            if num_prompts > limits.prompts_at_once:
                text = f"{num_prompts} answers are asked for; this key may have {limits.prompts_at_once} at once"
                raise RequestError(text, param="prompt")
            if at_once + num_prompts > limits.prompts_at_once:
                raise Overloaded(f"{at_once} prompts of this key are being served, which is its limit")
        if limits.tokens_per_minute is not None:
            tokens = self._allowance(self._tokens, caller.name, limits.tokens_per_minute, now)
            _require(tokens, 1.0, "tokens", limits.tokens_per_minute, now)
        if limits.requests_per_minute is not None:
            requests = self._allowance(self._requests, caller.name, limits.requests_per_minute, now)
            _require(requests, 1.0, "requests", limits.requests_per_minute, now)
            requests.take(1.0, now)
        self._note_untold(caller.name, 1, 0)
        self._prompts[caller.name] = at_once + num_prompts

    def admit_again(self, caller: Caller, num_prompts: int) -> None:
        """Count the prompts of a request that was admitted elsewhere before."""
        if caller.limits is not None:
            self._prompts[caller.name] = self._prompts.get(caller.name, 0) + num_prompts

    def release(self, caller: Caller, num_prompts: int) -> None:
        """The prompts of an admitted request are over."""
        if caller.limits is not None:
            self._prompts[caller.name] -= num_prompts

    def charge(self, caller: Caller, num_tokens: int, now: float) -> None:
        """The key has used tokens, of a prompt or of an answer."""
        if caller.limits is not None and caller.limits.tokens_per_minute is not None:
            self._allowance(self._tokens, caller.name, caller.limits.tokens_per_minute, now).take(num_tokens, now)
            self._note_untold(caller.name, 0, num_tokens)

    # what gateways report to each other

    def take_untold(self) -> list[tuple[str, int, int]]:
        """Return what each key has used here since the last call: its name, requests, tokens. O(keys that did).

        Tokens that were given back are kept, and taken from what the key uses next.
        """
        untold, self._untold = self._untold, {}
        self._untold = {name: [0, tokens] for name, (_, tokens) in untold.items() if tokens < 0}
        return [
            (name, requests, max(tokens, 0)) for name, (requests, tokens) in untold.items() if requests or tokens > 0
        ]

    def used_elsewhere(self, name: str, num_requests: int, num_tokens: int, now: float) -> None:
        """Count the requests and tokens that a key has used at another gateway. O(keys).

        Of requests at most what the key may begin at once, and never more than a minute takes to be earned again.
        """
        if name not in self._elsewhere and not self._has_room(now):
            return
        uses = self._elsewhere.setdefault(name, deque())
        if uses and now - uses[-1][0] < _TOGETHER_S:
            at, requests, tokens = uses.pop()
            uses.append((at, requests + num_requests, tokens + num_tokens))
        else:
            uses.append((now, num_requests, num_tokens))
        while uses[0][0] < now - _MINUTE_S:
            uses.popleft()
        for (key, limit), allowance in self._requests.items():
            if key == name:
                allowance.take_elsewhere(min(num_requests, limit), now)
        for (key, _), allowance in self._tokens.items():
            if key == name:
                allowance.take_elsewhere(num_tokens, now)

    def _has_room(self, now: float) -> bool:
        """Return whether one more key can be remembered, once those that used nothing for a minute are forgotten."""
        if len(self._elsewhere) >= MOST_KEYS:
            before = now - _MINUTE_S
            self._elsewhere = {name: uses for name, uses in self._elsewhere.items() if uses[-1][0] >= before}
        return len(self._elsewhere) < MOST_KEYS

    def _note_untold(self, name: str, num_requests: int, num_tokens: int) -> None:
        untold = self._untold.setdefault(name, [0, 0])
        untold[0] += num_requests
        untold[1] += num_tokens

    def _allowance(self, table: dict[tuple[str, int], _Allowance], name: str, limit: int, now: float) -> _Allowance:
        """Keyed by the limit too, so that a reloaded limit starts fresh, but for what was used elsewhere."""
        if (name, limit) not in table:
            uses = self._elsewhere.get(name, ())
            allowance = table[name, limit] = _Allowance(limit, uses[0][0] if uses else now)
            for at, num_requests, num_tokens in uses:
                allowance.take_elsewhere(min(num_requests, limit) if table is self._requests else num_tokens, at)
        return table[name, limit]


def _require(allowance: _Allowance, count: float, what: str, limit: int, now: float) -> None:
    if (wait_s := allowance.wait_s(count, now)) > 0:
        raise Overloaded(f"this key has used its {limit} {what} a minute", retry_after_s=wait_s)
