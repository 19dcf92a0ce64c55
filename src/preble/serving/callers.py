"""Who sends a request, and what that means for its placement."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from preble.config.keys import KeyConfig


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key, or anybody where no key is asked for.

    `name`: of the key, "" for anybody. `tenant`: callers of one tenant share caches. `is_admin`: may see everything.
    `shares_cache`: with all other callers that do. `limits`: None for none.
    """

    name: str = ""
    tenant: str = ""
    is_admin: bool = True
    shares_cache: bool = True
    weight: float = 1.0
    limits: KeyConfig | None = None

    def cache_salt(self, own: str | None) -> str | None:
        """Return the salt of its prompts' KV blocks, given the one that the client chose. None: no salt.

        >>> Caller().cache_salt("mine"), Caller().cache_salt(None)
        ('mine', None)
        >>> a, b = (Caller(tenant=tenant, shares_cache=False) for tenant in "ab")
        >>> a.cache_salt(None) == b.cache_salt(None), a.cache_salt(None) == a.cache_salt(None)
        (False, True)
        """
        if self.shares_cache:
            return own
        return sha256(f"{self.tenant}\0{own or ''}".encode(errors="surrogatepass")).hexdigest()[:32]


ANYBODY = Caller()
"""The caller where no key is asked for."""
