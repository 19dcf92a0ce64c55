"""The other gateways of the cluster, and how to reach them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from preble.config.knobs import NotNegative, OneOrMore


class PeersConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A group of gateways in front of one cluster, which tell each other over NATS what they place."""

    servers: tuple[str, ...] = ()
    """NATS servers, such as `nats://user:password@nats1:4222`; `tls://` for TLS. Needs the extra `ha`. Why: one gateway
    needs no peers."""
    cluster: str = "default"
    """Name of the cluster (letters, digits, `-` and `_`). Gateways with the same name form a group. Why: one cluster is
    the usual case."""
    name: str = ""
    """This gateway's name, for logs and metrics. Why: empty: the host's name and the process's number."""
    credentials: str | None = None
    """NATS credentials file (`.creds`). Why: the URL may have a user and a password."""
    tls_ca: str | None = None
    """Certificate authority of the NATS servers, a PEM file. Why: the system's."""
    tls_cert: str | None = None
    """This gateway's certificate towards NATS, a PEM file. Why: most servers ask for none."""
    tls_key: str | None = None
    """Its key, a PEM file. Why: it may be in the certificate's file."""
    secret_file: str | None = None
    """File with the group's secret: each line is one, and packets by any of them are taken
    (docs/howto/several-gateways.md). Read again when it changes. Why: gateways of a group have the same API keys, which
    are secret enough where clients cannot reach NATS."""
    silent_s: Annotated[float, Meta(ge=2)] = 5.0
    """[s] After this long without a message a peer is forgotten, with what it has in flight. Why: five missed beats."""
    warm_s: NotNegative = 10.0
    """[s] Longest wait at the start for peers to report what they have in flight; then the gateway is ready anyway.
    Why: a few beats; without NATS the gateway must still start."""
    prompt_memory_mib: OneOrMore = 128
    """[MiB, expert] Memory for prompts that gateways have sent each other: the next time, a name replaces their tokens.
    Why: twenty million tokens."""
