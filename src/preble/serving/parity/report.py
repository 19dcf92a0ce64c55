"""The results of parity checks, as values: for logs, metrics and pages."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Check(StrEnum):
    """What is compared. The first four are prompts whose token ids are compared."""

    COMPLETION = "completion"
    SPECIAL = "special"
    CHAT = "chat"
    TOOLS = "tools"
    CACHED_TOKENS = "cached_tokens"
    EVENTS = "events"


class Outcome(StrEnum):
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
    outcome: Outcome
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
    outcome: Outcome
    trusted: bool
    checked_at: float
    took_s: float
    findings: list[Finding]


def outcome_of(findings: list[Finding]) -> Outcome:
    """A mismatch if anything did not match, else unchecked if anything could not be compared.

    >>> outcome_of([Finding(check=Check.CHAT, outcome=Outcome.VERIFIED)]).value
    'verified'
    """
    found = {finding.outcome for finding in findings}
    return next((outcome for outcome in (Outcome.MISMATCH, Outcome.UNCHECKED) if outcome in found), Outcome.VERIFIED)
