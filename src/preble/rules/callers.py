"""Who sends a request, what that means for its placement, and a placement as rules follow it."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Protocol

from preble.config.keys import KeyConfig, Weight
from preble.core.types import Placement, ReplicaId, Request


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key, or anybody where no key is asked for.

    `name`: of the key, "" for anybody. `tenant`: callers of one tenant share caches. `is_admin`: may see everything.
    `shares_cache`: with all other callers that do. `limits`: None for none.
    `secret`: of the tenant, so that nobody else can compute the salts of its prompts.
    """

    name: str = ""
    tenant: str = ""
    is_admin: bool = True
    shares_cache: bool = True
    weight: Weight = 1.0
    limits: KeyConfig | None = None
    secret: str = field(default="", repr=False)

    def cache_salt(self, own: str | None) -> str | None:
        """Return the salt of the KV blocks of a key's prompts, given the one that the client chose. None: no salt.

        >>> a, b = (Caller(name=tenant, tenant=tenant, shares_cache=False) for tenant in "ab")
        >>> a.cache_salt(None) == b.cache_salt(None), a.cache_salt(None) == a.cache_salt(None)
        (False, True)
        """
        # A key's own salt is hashed too, apart from those of tenants: nobody can send the salt of somebody else.
        if not self.shares_cache:
            return _hashed(self.secret, "tenant", self.tenant, own or "")
        return _hashed("", "shared", own) if own else None


def _hashed(secret: str, *parts: str) -> str:
    return hmac.digest(secret.encode(), "\0".join(parts).encode(errors="surrogatepass"), "sha256").hex()[:32]


ANYBODY = Caller()
"""The caller where no key is asked for."""


class OnTerms(Protocol):
    """Who sent the request, and whether its answer is streamed."""

    @property
    def caller(self) -> Caller: ...
    @property
    def streams(self) -> bool: ...


class Followed(Protocol):
    """Where the request is now, and on which terms. `begun_at`: when its first token came, None before. `stalls`: its
    replica is ejected because it begins no answer. `blamed`: the replica that a failure is laid to."""

    request: Request
    placed_at: float
    begun_at: float | None
    stalls: bool
    blamed: ReplicaId

    @property
    def placement(self) -> Placement: ...
    @property
    def terms(self) -> OnTerms: ...
