"""Replicas that are found instead of named: through DNS or Kubernetes, and how changes are noticed."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from preble.config.knobs import about
from preble.errors import ConfigError

Port = Annotated[int, Meta(ge=1, le=65535)]


class GroupConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A group of replicas that the gateway looks up and follows.

    Give exactly one of `dns`, `srv`, `service`, `pods` and `pool`.
    """

    dns: Annotated[
        str | None,
        about("DNS name; each of its addresses is a replica.", why="one of the five is given"),
    ] = None
    srv: Annotated[
        str | None,
        about("Name of DNS SRV records; each target's addresses are replicas.", why="one of the five is given"),
    ] = None
    service: Annotated[
        str | None,
        about("Kubernetes service; each endpoint in its EndpointSlices is a replica.", why="one of the five is given"),
    ] = None
    pods: Annotated[
        str | None,
        about("Kubernetes label selector, such as `app=vllm`; each pod is a replica.", why="one of the five is given"),
    ] = None
    pool: Annotated[
        str | None,
        about(
            "Kubernetes InferencePool; each pod that it selects is a replica at each of its target ports.",
            why="one of the five is given",
        ),
    ] = None
    namespace: Annotated[
        str | None, about("Namespace of the service, pods or pool.", why="the gateway's own, else `default`")
    ] = None
    port: Annotated[
        Port | str | None,
        about(
            "Port of each replica. In Kubernetes also a port's name; without one the first port counts.",
            why="SRV records have one",
        ),
    ] = None
    scheme: Annotated[Literal["http", "https"], about("How to speak to the replicas.", why="what engines serve")] = (
        "http"
    )
    engine: Annotated[
        str | None, about("Their program, if it differs from the common `engine`.", why="most fleets are of one kind")
    ] = None
    kv_events_port: Annotated[
        Port | None, about("ZMQ port of each replica's KV events.", why="vLLM reports it itself")
    ] = None
    kv_events_replay_port: Annotated[
        Port | None, about("ZMQ port that replays past KV events.", why="vLLM reports it itself")
    ] = None
    kv_events_topic: Annotated[str, about("Topic of their KV events.", why="vLLM's own default")] = ""

    @property
    def name(self) -> str:
        """What is looked up, as metrics and logs name it. Raises: ConfigError: not exactly one thing is."""
        kinds = ("dns", "srv", "service", "pods", "pool")
        given = {kind: getattr(self, kind) for kind in kinds if getattr(self, kind)}
        if len(given) != 1:
            raise ConfigError("a group needs exactly one of `dns`, `srv`, `service`, `pods` and `pool`")
        [(kind, what)] = given.items()
        inside = f" in {self.namespace}" if self.namespace else ""
        return f"{kind} {what}{inside}" + (f":{self.port}" if self.port is not None else "")


class DiscoveryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How changes of the fleet are noticed: docs/howto/fleet.md."""

    file_interval_s: Annotated[
        float,
        about(
            "Time between two looks at the configuration and keys files; 0: they are read again only at SIGHUP.",
            unit="s",
            why="one small read; works on every file system",
            ge=0,
        ),
    ] = 2.0
    dns_interval_s: Annotated[
        float,
        about(
            "Longest time between two lookups of a DNS name; sooner if its records say so, but not within 1 s.",
            unit="s",
            why="many resolvers cache for as long",
            gt=0,
        ),
    ] = 30.0
    dns_server: Annotated[
        str | None,
        about("DNS server to ask, as ADDRESS or ADDRESS:PORT.", why="the system's (`/etc/resolv.conf`)"),
    ] = None
    missing_grace_s: Annotated[
        float,
        about(
            "How long replicas stay whose Kubernetes service or InferencePool was deleted.",
            unit="s",
            why="longer than a Helm chart takes to be installed again",
            ge=0,
        ),
    ] = 300.0
    kubeconfig: Annotated[
        str | None,
        about(
            "File that says where the Kubernetes API is.",
            why="inside a cluster the pod's service account, else `~/.kube/config`",
        ),
    ] = None
