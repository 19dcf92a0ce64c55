"""The other gateways of the cluster, and how to reach them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from preble.config.knobs import about


class PeersConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A group of gateways in front of one cluster, which tell each other over NATS what they place."""

    servers: Annotated[
        tuple[str, ...],
        about(
            "NATS servers, such as `nats://user:password@nats1:4222`; `tls://` for TLS. Needs the extra `ha`.",
            why="one gateway needs no peers",
        ),
    ] = ()
    cluster: Annotated[
        str,
        about(
            "Name of the cluster (letters, digits, `-` and `_`). Gateways with the same name form a group.",
            why="one cluster is the usual case",
        ),
    ] = "default"
    name: Annotated[
        str,
        about("This gateway's name, for logs and metrics.", why="empty: the host's name and the process's number"),
    ] = ""
    credentials: Annotated[
        str | None, about("NATS credentials file (`.creds`).", why="the URL may have a user and a password")
    ] = None
    tls_ca: Annotated[
        str | None, about("Certificate authority of the NATS servers, a PEM file.", why="the system's")
    ] = None
    tls_cert: Annotated[
        str | None, about("This gateway's certificate towards NATS, a PEM file.", why="most servers ask for none")
    ] = None
    tls_key: Annotated[str | None, about("Its key, a PEM file.", why="it may be in the certificate's file")] = None
    secret_file: Annotated[
        str | None,
        about(
            "File with the group's secret: each line is one, and packets by any of them are taken (docs/howto/"
            "several-gateways.md). Read again when it changes.",
            why="gateways of a group have the same API keys, which are secret enough where clients cannot reach NATS",
        ),
    ] = None
    silent_s: Annotated[
        float,
        about(
            "After this long without a message a peer is forgotten, with what it has in flight.",
            unit="s",
            why="five missed beats",
            ge=2,
        ),
    ] = 5.0
    warm_s: Annotated[
        float,
        about(
            "Longest wait at the start for peers to report what they have in flight; then the gateway is ready anyway.",
            unit="s",
            why="a few beats; without NATS the gateway must still start",
            ge=0,
        ),
    ] = 10.0
    prompt_memory_mib: Annotated[
        int,
        about(
            "Memory for prompts that gateways have sent each other: the next time, a name replaces their tokens.",
            unit="MiB",
            is_expert=True,
            why="twenty million tokens",
            ge=1,
        ),
    ] = 128
