"""The endpoint picker: where gateways ask it, and which of several pickers answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class PickerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The endpoint picker of `preble epp`: docs/howto/kubernetes-gateway.md."""

    port: Annotated[int, Meta(ge=0, le=65535)] = 9002
    """Port at which gateways ask (gRPC); 0 lets the system choose. Why: what the Gateway API Inference Extension
    uses."""
    lease: str | None = None
    """Name of a Kubernetes Lease that several pickers share; only its holder is ready. Why: one picker needs none."""
    namespace: str | None = None
    """Namespace of the lease. Why: the picker's own, else `default`."""
    tls_cert: str | None = None
    """File with the certificate chain (PEM) for gateways that ask through TLS. Why: many meshes encrypt."""
    tls_key: str | None = None
    """File with its private key (PEM). Why: none without a certificate."""
