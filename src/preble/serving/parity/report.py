"""The results of parity checks, as values: for logs, metrics and pages."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import zip_longest

import msgspec


class Check(StrEnum):
    """What is compared. The first four are prompts whose token ids are compared."""

    COMPLETION = "completion"
    SPECIAL = "special"
    CHAT = "chat"
    TOOLS = "tools"
    IDS = "ids"
    """Answers to texts, and to their token ids in place of them."""
    CACHED_TOKENS = "cached_tokens"
    EVENTS = "events"
    COPY = "copy"
    """Answers to a prompt that was copied from another replica, and to the same on that one."""


class ParityOutcome(StrEnum):
    VERIFIED = "verified"
    MISMATCH = "mismatch"
    UNCHECKED = "unchecked"
    """It could not be compared."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check.

    `detail`: for a person, "" where there is nothing to say. `position`: of the first token that differs, from 0, with
    the ids there, None where the prompt has ended. `misleads`: matches on this replica promise what it does not hold.
    """

    check: Check
    outcome: ParityOutcome
    detail: str = ""
    position: int | None = None
    ours: int | None = None
    theirs: int | None = None
    misleads: bool = False


class ParityReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the last check of one replica.

    `trusted`: whether matches there count. `checked_at`: Unix time in seconds.
    """

    replica: str
    engine: str
    outcome: ParityOutcome
    trusted: bool
    checked_at: float
    took_s: float
    findings: list[Finding]


def outcome_of(findings: list[Finding]) -> ParityOutcome:
    """Return a mismatch if anything did not match, else unchecked if anything could not be compared.

    >>> outcome_of([Finding(check=Check.CHAT, outcome=ParityOutcome.VERIFIED)]).value
    'verified'
    """
    found = {finding.outcome for finding in findings}
    return next(
        (outcome for outcome in (ParityOutcome.MISMATCH, ParityOutcome.UNCHECKED) if outcome in found),
        ParityOutcome.VERIFIED,
    )


def compare_ids(check: Check, ours: Sequence[int], theirs: Sequence[int]) -> Finding:
    """Return the first token that differs. If only tools differ, everything else still matches.

    >>> compare_ids(Check.CHAT, [1, 2], [1, 2]).outcome.value
    'verified'
    >>> finding = compare_ids(Check.CHAT, [1, 2], [1])
    >>> finding.position, finding.ours, finding.theirs
    (1, 2, None)
    """
    pairs = enumerate(zip_longest(ours, theirs))
    different = next(((i, a, b) for i, (a, b) in pairs if a != b), None)
    if different is None:
        return Finding(check=check, outcome=ParityOutcome.VERIFIED)
    position, our_id, their_id = different
    return Finding(
        check=check,
        outcome=ParityOutcome.MISMATCH,
        detail=f"token {position} is {_named(our_id, ours)} in the gateway, {_named(their_id, theirs)} in the replica",
        position=position,
        ours=our_id,
        theirs=their_id,
        misleads=check not in (Check.TOOLS, Check.IDS),
    )


def _named(token_id: int | None, ids: Sequence[int]) -> str:
    return f"missing (there are {len(ids)})" if token_id is None else str(token_id)


def unchecked(check: Check, why: str) -> Finding:
    """Return a check that could not be made."""
    return Finding(check=check, outcome=ParityOutcome.UNCHECKED, detail=why)


def mismatch(check: Check, detail: str, *, misleads: bool = False) -> Finding:
    """`misleads`: as `Finding`'s."""
    return Finding(check=check, outcome=ParityOutcome.MISMATCH, detail=detail, misleads=misleads)
