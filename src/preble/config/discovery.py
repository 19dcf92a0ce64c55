"""Replicas that are found instead of named: through DNS or Kubernetes, and how changes are noticed."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from preble.config.knobs import NotNegative, Positive
from preble.core.types import Role
from preble.errors import ConfigError

Port = Annotated[int, Meta(ge=1, le=65535)]


class GroupConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A group of replicas that the gateway looks up and follows.

    Give exactly one of `dns`, `srv`, `service`, `pods` and `pool`.
    """

    dns: str | None = None
    """DNS name; each of its addresses is a replica. Why: one of the five is given."""
    srv: str | None = None
    """Name of DNS SRV records; each target's addresses are replicas. Why: one of the five is given."""
    service: str | None = None
    """Kubernetes service; each endpoint in its EndpointSlices is a replica. Why: one of the five is given."""
    pods: str | None = None
    """Kubernetes label selector, such as `app=vllm`; each pod is a replica. Why: one of the five is given."""
    pool: str | None = None
    """Kubernetes InferencePool; each pod that it selects is a replica at each of its target ports. Why: one of the five
    is given."""
    namespace: str | None = None
    """Namespace of the service, pods or pool. Why: the gateway's own, else `default`."""
    port: Port | str | None = None
    """Port of each replica. In Kubernetes also a port's name; without one the first port counts. Why: SRV records have
    one."""
    scheme: Literal["http", "https"] = "http"
    """How to speak to the replicas. Why: what engines serve."""
    engine: str | None = None
    """Their program, if it differs from the common `engine`. Why: most fleets are of one kind."""
    kv_events_port: Port | None = None
    """ZMQ port of each replica's KV events. Why: vLLM reports it itself."""
    kv_events_replay_port: Port | None = None
    """ZMQ port that replays past KV events. Why: vLLM reports it itself."""
    kv_events_topic: str = ""
    """Topic of their KV events. Why: vLLM's own default."""
    role: Role | None = None
    """What they are for: see a replica's `role`. Why: as there; a service for each role can say it so."""
    transfer_group: str = ""
    """Name of those among which KV may be sent. Why: see a replica's `transfer_group`."""
    role_label: str = ""
    """Label of a pod that says its role, beside `preble/role`. Why: those of llm-d, Dynamo and AIBrix are known."""
    transfer_group_label: str = ""
    """Label of a pod that names its transfer group, such as the one of its zone, beside `preble/transfer-group`. Why:
    mostly all reach each other."""

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

    file_interval_s: NotNegative = 2.0
    """[s] Time between two looks at the configuration and keys files; 0: they are read again only at SIGHUP. Why: one
    small read; works on every file system."""
    dns_interval_s: Positive = 30.0
    """[s] Longest time between two lookups of a DNS name; sooner if its records say so, but not within 1 s. Why: many
    resolvers cache for as long."""
    dns_server: str | None = None
    """DNS server to ask, as ADDRESS or ADDRESS:PORT. Why: the system's (`/etc/resolv.conf`)."""
    missing_grace_s: NotNegative = 300.0
    """[s] How long replicas stay whose Kubernetes service or InferencePool was deleted. Why: longer than a Helm chart
    takes to be installed again."""
    kubeconfig: str | None = None
    """File that says where the Kubernetes API is. Why: inside a cluster the pod's service account, else
    `~/.kube/config`."""
