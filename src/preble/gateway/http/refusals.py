"""Answers to requests that the gateway refuses unread."""

from __future__ import annotations

from collections.abc import Iterable

from preble.gateway.http.page_client import PageClient
from preble.prompts.endpoints import ErrorForm

FORBIDDEN = ErrorForm(
    403, "permission_error", "admin_key_needed", "this needs an admin key (auth.admin_keys, or admin = true of a key)"
)
NO_ADMINS = ErrorForm(
    403,
    "permission_error",
    "admin_key_needed",
    "replicas are changed only with an admin key, and this gateway has no keys: set auth.admin_keys",
)
STOPPING = ErrorForm(503, "service_unavailable", "shutting_down", "the gateway is shutting down", retry_after_s=1.0)


async def not_allowed(client: PageClient, method: str, allowed: Iterable[str]) -> None:
    """Answer a request with another method than those allowed; where GET is, HEAD is, too."""
    methods = ", ".join("GET, HEAD" if one == "GET" else one for one in allowed)
    form = ErrorForm(405, "invalid_request_error", "method_not_allowed", f"{method} is not allowed here; use {methods}")
    await client.reply(405, [*form.headers(), (b"allow", methods.encode())], form.body(client.errors))
