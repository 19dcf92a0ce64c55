"""Answers to requests that the gateway refuses unread: the admin key is missing, or it is shutting down."""

from __future__ import annotations

from preble.serving import ErrorForm

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
