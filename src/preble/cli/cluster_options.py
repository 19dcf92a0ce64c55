"""Options of commands that simulate a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from preble.cli.options import NOT_NEGATIVE_FLOAT, POSITIVE, POSITIVE_FLOAT, Read, all_of, option, order_option
from preble.core.replica.waiting_queue import QueueOrder

if TYPE_CHECKING:
    from preble.lab.sim import SimConfig


def simulated_cluster(
    *,
    profile: str,
    order: str,
    failures: tuple[str, ...],
    speeds: tuple[tuple[str, float], ...],
    kv_shares: tuple[tuple[str, float], ...],
    gateways: int,
    gossip_delay_s: float | None,
    gossip_loss: float,
    gossip_cuts: tuple[str, ...],
    link_gb_per_s: float | None,
    transfer_groups: tuple[str, ...],
    splits: bool,
    prefill: int | None,
    **rest: Any,
) -> SimConfig:
    """Return the cluster for `cluster_options` and other fields of `SimConfig`. Raises: ConfigError."""
    from preble.errors import ConfigError
    from preble.lab.sim import Cut, Failure, GatewayGroup, SimConfig, SimLinks
    from preble.profiles import load_profile, with_kv_size

    cuts = tuple(map(Cut.parse, gossip_cuts))
    group = GatewayGroup(gateways=gateways, delay_s=gossip_delay_s, loss=gossip_loss, cuts=cuts)
    links = None
    if link_gb_per_s is not None:
        groups = tuple(tuple(names.split(",")) for names in transfer_groups)
        links = SimLinks(bytes_per_s=link_gb_per_s * 1e9, groups=groups, splits=splits, prefill=prefill or 0)
    elif transfer_groups or splits or prefill:
        given = "--transfer-group" if transfer_groups else "--splits" if splits else "--prefill"
        raise ConfigError(f"{given} needs the links' rate: add --link-gb-per-s")
    script = tuple(Failure.parse(text) for text in failures)
    return SimConfig(
        profile=load_profile(profile) if links is None else with_kv_size(load_profile(profile)),
        order=QueueOrder(order),
        failures=script,
        speeds=dict(speeds),
        kv_shares=dict(kv_shares),
        group=group if gateways > 1 else None,
        links=links,
        **rest,
    )


def _of_replica(text: str) -> tuple[str, float]:
    replica, _, number = text.partition("=")
    if not number:
        raise ValueError
    return replica, float(POSITIVE_FLOAT(number))


_OF_REPLICA = Read("REPLICA=X", _of_replica)
"""A positive number of one replica."""


cluster_options = all_of(
    option("--replicas", "Number of replicas: r0, r1, and so on.", POSITIVE, default=4),
    option(
        "--profile",
        "Cost profile: which GPU and model a replica behaves like.",
        default="a6000-mistral-7b",
        metavar="NAME|FILE",
    ),
    option("--kv-tokens", "KV cache of one replica, in tokens.  [default: the profile's]", POSITIVE),
    option("--block-size", "Tokens in a block of KV cache.", POSITIVE, default=16),
    option("--max-batch-tokens", "The most tokens that one iteration of a replica computes.", POSITIVE, default=2048),
    order_option("Order of the waiting requests on a replica."),
    option("--window-s", "How far back load counts (H), in seconds.", POSITIVE_FLOAT, default=180.0),
    option(
        "--fail failures",
        "At T seconds the replica is lost, added, restarted or drained. Repeatable.",
        multiple=True,
        metavar="T:KIND:REPLICA",
    ),
    option(
        "--speed speeds",
        "A replica computes X times as fast as the profile says, 0.5 for half. Repeatable.",
        _OF_REPLICA,
        multiple=True,
        metavar="REPLICA=X",
    ),
    option(
        "--kv-share kv_shares",
        "A replica has X times the KV cache of the others. Repeatable.",
        _OF_REPLICA,
        multiple=True,
        metavar="REPLICA=X",
    ),
    option("--profile-error", "The scheduler overestimates all times by this factor.", POSITIVE_FLOAT, default=1.0),
    option(
        "--knowledge-delay-s",
        "Seconds by which first tokens, ends and KV events reach the scheduler late.",
        NOT_NEGATIVE_FLOAT,
        default=0.0,
    ),
    option(
        "--dispatch-s",
        "Delay of a request to its replica, in seconds.",
        NOT_NEGATIVE_FLOAT,
        show_default=False,
        default=0.0,
    ),
    option(
        "--gateways",
        "Gateways, each with a scheduler of its own; a request goes to any of them (docs/concepts/scale.md).",
        POSITIVE,
        default=1,
    ),
    option(
        "--gossip-delay gossip_delay_s",
        "Seconds until the other gateways know of a placement; never: they send each other nothing.",
        Read("seconds or never", lambda text: None if text == "never" else float(NOT_NEGATIVE_FLOAT(text))),
        default="0.05",
        metavar="S|never",
    ),
    option(
        "--gossip-loss",
        "Share of the messages between gateways that do not arrive.",
        click.FloatRange(0, 1, max_open=True),
        default=0.0,
    ),
    option(
        "--gossip-cut gossip_cuts",
        "Between these seconds no message between gateways arrives. Repeatable.",
        multiple=True,
        metavar="FROM:UNTIL",
    ),
    option(
        "--link-gb-per-s",
        "Replicas copy KV from each other, at this rate in GB/s.  [default: they cannot]",
        POSITIVE_FLOAT,
    ),
    option(
        "--transfer-group transfer_groups",
        "Only these replicas copy from each other. Repeatable, for further groups.  [default: all of them]",
        multiple=True,
        metavar="REPLICA,...",
    ),
    option("--splits", "One replica may also compute a prompt whose answer another one decodes.", is_flag=True),
    option(
        "--prefill",
        "The first N replicas only compute prompts, and the others only decode.  [default: each does both]",
        POSITIVE,
        metavar="N",
    ),
)
"""Those of a simulated cluster, without policy and seed; `simulated_cluster` reads them."""
