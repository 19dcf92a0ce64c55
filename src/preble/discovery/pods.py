"""From Kubernetes objects, as the API sends them, to members. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from preble.config import GroupConfig
from preble.core.types import Role
from preble.discovery.member import Member, member_at
from preble.errors import ConfigError

Object = Mapping[str, Any]
"""A Kubernetes object as decoded JSON."""

NOT_READY = "the pod is not ready"
TERMINATING = "the pod is terminating"
_NUMBERS = MappingProxyType(
    {
        "preble/port": "port",
        "preble/kv-events-port": "kv_events_port",
        "preble/kv-events-replay-port": "kv_events_replay_port",
    }
)
_WORDS = MappingProxyType(
    {
        "preble/engine": "engine",
        "preble/kv-events-topic": "kv_events_topic",
        "preble/transfer-group": "transfer_group",
    }
)
_ROLE = "preble/role"
_ROLE_LABELS = ("llm-d.ai/role", "nvidia.com/dynamo-sub-component-type", "role-name")
"""Of llm-d, Dynamo and AIBrix."""
ROLES = MappingProxyType(
    {
        **{str(role): role for role in Role},
        "prefill-decode": Role.MIXED,
        "encode-prefill-decode": Role.MIXED,
        "both": Role.MIXED,
        "encode-prefill": Role.PREFILL,
    }
)
"""What labels may say."""
_OVER = ("Succeeded", "Failed")
_HIGHEST_PORT = 65535


class UnknownRole(NamedTuple):
    """A pod's label that was to say the role of the member at `url`, and has a value that is none."""

    url: str
    label: str
    value: str


class Named(NamedTuple):
    """The members that objects name, ordered by URL, and what is wrong with objects that name none.

    `is_missing`: the service or pool that names them is not there; the members are those that it named last.
    `unknown_roles`: of members that have another role for that, or none.
    """

    members: tuple[Member, ...]
    problems: tuple[str, ...]
    is_missing: bool = False
    unknown_roles: tuple[UnknownRole, ...] = ()


def members_of_slices(slices: Iterable[Object], group: GroupConfig) -> Named:
    """Return the members in all EndpointSlices of a service.

    A pod may be in several slices: while it is moved between them, and with an address of each family. It is one
    member, at its IPv4 address if it has one.
    """
    best: dict[str, tuple[tuple[bool, bool], Member]] = {}
    problems = []
    for one in slices:
        if one.get("addressType") not in ("IPv4", "IPv6") or not one.get("endpoints"):
            continue
        try:
            port = _port(group.port, {p.get("name") or "": p.get("port") for p in one.get("ports") or ()})
        except ConfigError as error:
            problems.append(f"slice {_name(one)}: {error}")
            continue
        for endpoint in one["endpoints"]:
            member = _of_endpoint(endpoint, port, group)
            rank = (one["addressType"] == "IPv4", member.held_back is None)
            key = member.incarnation or member.url
            if key not in best or best[key][0] < rank:
                best[key] = (rank, member)
    return _named((member for _, member in best.values()), problems)


def _of_endpoint(endpoint: Object, port: int, group: GroupConfig) -> Member:
    conditions = endpoint.get("conditions") or {}
    return member_at(
        group,
        endpoint["addresses"][0],
        port,
        incarnation=(endpoint.get("targetRef") or {}).get("uid") or "",
        held_back=_held_back(conditions.get("ready") is not False, bool(conditions.get("terminating"))),
    )


def members_of_pods(pods: Iterable[Object], group: GroupConfig) -> Named:
    """Return a member for each pod that has an address and has not ended.

    Annotations and labels of a pod (`preble/port`, `preble/engine`, `preble/role`, ...) go before the group's settings.
    """
    members, problems = [], []
    unknown: list[UnknownRole] = []
    for pod in pods:
        try:
            if (member := _of_pod(pod, group)) is not None:
                members.append(member)
                unknown += _unknown_role(member, _marks(pod), group)
        except ConfigError as error:
            problems.append(f"pod {_name(pod)}: {error}")
    return _named(members, problems)._replace(unknown_roles=tuple(sorted(unknown)))


def groups_of_pool(pools: Iterable[Object], group: GroupConfig) -> tuple[GroupConfig, ...]:
    """Return a group of pods for each target port of an InferencePool; none if the pool does not exist."""
    spec: Object = next((pool.get("spec") or {} for pool in pools), {})
    labels: Mapping[str, str] = (spec.get("selector") or {}).get("matchLabels") or {}
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    ports = (port["number"] for port in spec.get("targetPorts") or () if selector)
    return tuple(msgspec.structs.replace(group, pool=None, pods=selector, port=port) for port in ports)


def _of_pod(pod: Object, group: GroupConfig) -> Member | None:
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    address = status.get("podIP")
    if not address or status.get("phase") in _OVER:
        return None
    is_ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())
    marks = _marks(pod)
    settings = {**_labelled(marks, group), **dict(_annotated(marks))}
    containers = (pod.get("spec") or {}).get("containers") or ()
    ports = {port.get("name") or "": port.get("containerPort") for c in containers for port in c.get("ports") or ()}
    return member_at(
        group,
        address,
        _port(settings.pop("port", group.port), ports),
        incarnation=metadata.get("uid", ""),
        held_back=_held_back(is_ready, "deletionTimestamp" in metadata),
        settings=settings,
    )


def _marks(pod: Object) -> Mapping[str, str]:
    metadata = pod.get("metadata") or {}
    return {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}


def _unknown_role(member: Member, marks: Mapping[str, str], group: GroupConfig) -> Iterator[UnknownRole]:
    """Yield what the group's own label says, if it counts and is no role. The labels of others say more than roles."""
    value = marks.get(group.role_label)
    if value is not None and value not in ROLES and _ROLE not in marks:
        yield UnknownRole(member.url, group.role_label, value)


def _labelled(marks: Mapping[str, str], group: GroupConfig) -> dict[str, str | int]:
    """Return the role and the transfer group that labels of others give a pod, where they do."""
    found: dict[str, str | int] = {}
    if name := marks.get(group.transfer_group_label):
        found["transfer_group"] = name
    for label in (group.role_label, *_ROLE_LABELS):
        if (role := ROLES.get(marks.get(label, ""))) is not None:
            return {**found, "role": role}
    return found


def _annotated(annotations: Mapping[str, str]) -> Iterator[tuple[str, str | int]]:
    """Raises: ConfigError: a port is no number, or a role none."""
    for key, setting in _NUMBERS.items():
        if (value := annotations.get(key)) is not None:
            if not (value.isascii() and value.isdigit() and len(value) <= 5 and 1 <= int(value) <= _HIGHEST_PORT):
                raise ConfigError(f"annotation {key}={value[:50]!r} is no port")
            yield setting, int(value)
    for key, setting in _WORDS.items():
        if (value := annotations.get(key)) is not None:
            yield setting, value
    if (value := annotations.get(_ROLE)) is not None:
        if value not in ROLES:
            raise ConfigError(f"{_ROLE}={value[:50]!r} is no role; there are: {', '.join(Role)}")
        yield "role", ROLES[value]


def _port(wanted: int | str | None, ports: Mapping[str, int | None]) -> int:
    """Return the number of a port: given as such, by its name, or the first one. Raises: ConfigError: there is none."""
    if isinstance(wanted, int):
        return wanted
    if wanted is None:
        number = next(iter(ports.values()), None)
    elif wanted.isdigit():
        number = int(wanted)
    else:
        number = ports.get(wanted)
    if number is None:
        raise ConfigError(f"no port {wanted or ''!r}; there are: {', '.join(map(repr, ports)) or 'none'}")
    return number


def _held_back(is_ready: bool, is_terminating: bool) -> str | None:
    return TERMINATING if is_terminating else None if is_ready else NOT_READY


def _named(members: Iterable[Member], problems: Iterable[str]) -> Named:
    return Named(tuple(sorted(members, key=lambda member: member.url)), tuple(problems))


def _name(item: Object) -> str:
    return str((item.get("metadata") or {}).get("name"))
