"""The endpoint picker: where gateways ask it, and which of several pickers answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from preble.config.knobs import about


class PickerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The endpoint picker of `preble epp`: docs/howto/kubernetes-gateway.md."""

    port: Annotated[
        int,
        about(
            "Port at which gateways ask (gRPC); 0 lets the system choose.",
            why="what the Gateway API Inference Extension uses",
            ge=0,
            le=65535,
        ),
    ] = 9002
    lease: Annotated[
        str | None,
        about(
            "Name of a Kubernetes Lease that several pickers share; only its holder is ready.",
            why="one picker needs none",
        ),
    ] = None
    namespace: Annotated[str | None, about("Namespace of the lease.", why="the picker's own, else `default`")] = None
    tls_cert: Annotated[
        str | None,
        about("File with the certificate chain (PEM) for gateways that ask through TLS.", why="many meshes encrypt"),
    ] = None
    tls_key: Annotated[str | None, about("File with its private key (PEM).", why="none without a certificate")] = None
