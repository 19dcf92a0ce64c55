"""The command lines and environments with which engines are started on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from preble.core.types import Role
from preble.engines.starting.gpus import num_ranks, num_workers, shared_out, visible_gpus
from preble.engines.starting.ports import free_ports
from preble.engines.starting.programs import find_sglang, find_vllm, own_vllm
from preble.engines.starting.transfer_flags import OWN_NIXL, TransferWay, transfer_config
from preble.errors import ConfigError

CPU_BLOCK_SIZE = 32
"""vLLM's CPU attention wants a multiple of 32."""

CPU_KV_BYTES = 256 * 1024 * 1024
CPU_KV_TOKENS = 65_536
DEFAULT_PROFILE = "tiny-cpu"

SGLANG_PAGE_SIZE = 16
"""Tokens that it caches and announces together. Its own default is 1: an event for every token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What to start.

    `model`: for vLLM and SGLang a folder or a name on the hub. `served_model_name`: the model's name in requests; None
    leaves it to the engine. `profile`: the emulator's. `kv_tokens`: KV cache of each replica in tokens, None for the
    engine's own choice. `device`: "auto" takes the CPU for the environments of `dev/setup.py` and GPUs, one for
    each replica, for any other engine where there are some. `threads`: of each replica on a CPU; None gives each its
    part of the processors. `executable`: the vllm or sglang program. `dev_endpoints`: with vLLM's /reset_prefix_cache
    and the like. `roles`: of each replica, where they prefill or decode only; empty where all do both. `transfer`: how
    replicas without roles send each other KV, None for not at all. vLLM with roles has NIXL, and the roles from the
    gateway. `extra_args` go to the engine as they are. `log_dir` gets one log file for each replica. `grace_s`:
    time between asking a replica to end and killing it.
    """

    engine: Literal["vllm", "sglang", "emulator"]
    replicas: int
    log_dir: Path
    model: str | None = None
    served_model_name: str | None = None
    profile: str | None = None
    kv_tokens: int | None = None
    max_model_len: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    executable: Path | None = None
    dev_endpoints: bool = False
    roles: tuple[Role, ...] = ()
    transfer: TransferWay | None = None
    extra_args: tuple[str, ...] = ()
    ready_timeout_s: float = 300.0
    grace_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Command:
    """How to start one replica.

    `port`: of its HTTP server; None where it says so itself in its log. `ready_path`: answers 200 when it is ready.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    port: int | None
    ready_path: str = "/health"


def commands_for(options: LaunchOptions) -> list[Command]:
    """Return one command for each replica. Raises: ConfigError: something is missing or does not fit."""
    if options.replicas < 1:
        raise ConfigError(f"{options.replicas} replicas cannot be started; give at least 1")
    if options.roles and len(options.roles) != options.replicas:
        raise ConfigError(f"{len(options.roles)} roles are given for {options.replicas} replicas")
    if options.transfer is not None and (options.engine == "sglang" or options.roles):
        remedy = "leave --transfer out" if options.roles else "SGLang needs roles for that: --prefill and --decode"
        raise ConfigError(f"replicas with roles send each other KV anyway, and others of SGLang cannot; {remedy}")
    if options.engine == "emulator":
        return [_emulator_command(options, role) for role in _roles(options)]
    _check_model(options)
    return _sglang_commands(options) if options.engine == "sglang" else _vllm_commands(options)


def _check_model(options: LaunchOptions) -> None:
    name = "SGLang" if options.engine == "sglang" else "vLLM"
    if options.model is None:
        raise ConfigError(f"{name} needs a model: give a folder or a name on the hub")
    if options.model.startswith((".", "/", "~")) and not Path(options.model).expanduser().is_dir():
        raise ConfigError(f"there is no model folder {options.model!r}")


def _roles(options: LaunchOptions) -> tuple[Role, ...]:
    return options.roles or (Role.MIXED,) * options.replicas


def _emulator_command(options: LaunchOptions, role: Role) -> Command:
    [http] = free_ports(1)
    argv = [sys.executable, "-m", "preble", "emulate", "--profile", options.profile or DEFAULT_PROFILE]
    argv += ["--port", str(http), "--events-port", "0"]
    if options.kv_tokens is not None:
        argv += ["--kv-tokens", str(options.kv_tokens)]
    if role is not Role.MIXED:
        argv += ["--role", role]
    if options.transfer is not None:
        argv += [f"--{options.transfer}"]
    return Command((*argv, *options.extra_args), dict(os.environ), http)


def _vllm_commands(options: LaunchOptions) -> list[Command]:
    executable = find_vllm(options.executable)
    gpus = _gpus_for(options, is_own=executable == own_vllm())
    return [_vllm_command(options, executable, of_one) for of_one in gpus]


def _vllm_command(options: LaunchOptions, executable: Path, gpus: str | None) -> Command:
    ranks = num_ranks(options.extra_args)
    http, events, *more = free_ports(1 + 3 * ranks)
    replay, kv = more[ranks - 1], more[2 * ranks - 1]  # each rank takes the port after the one before
    kv_events = {"enable_kv_cache_events": True, **_kv_events(events, replay)}
    argv = [str(executable), "serve", str(options.model), "--host", "127.0.0.1", "--port", str(http)]
    argv += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(kv_events)]
    if options.served_model_name is not None:
        argv += ["--served-model-name", options.served_model_name]
    if options.max_model_len is not None:
        argv += ["--max-model-len", str(options.max_model_len)]
    if gpus is None:
        argv += _cpu_args(options)
    elif options.kv_tokens is not None:
        raise ConfigError("the KV cache of a GPU replica is not given in tokens; use --gpu-memory-utilization instead")
    environ = _vllm_environment(options, gpus)
    if (way := "nixl" if options.roles else options.transfer) is not None:
        arguments, variables = transfer_config(way, kv, options.replicas, is_on_cpu=gpus is None, own_nixl=_own_nixl())
        argv += arguments
        environ |= variables
    return Command((*argv, *options.extra_args), environ, http)


def _kv_events(port: int, replay_port: int) -> dict[str, object]:
    """Return what both engines' --kv-events-config takes."""
    endpoints = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay_port}"}
    return {"publisher": "zmq", **endpoints, "topic": "kv"}


def _cpu_args(options: LaunchOptions) -> list[str]:
    # Not bfloat16: where the processor has AMX, the attention of vLLM 0.32 then dies of an illegal instruction.
    args = ["--dtype", "float32", "--block-size", str(CPU_BLOCK_SIZE), "--enforce-eager"]
    args += ["--max-num-batched-tokens", "1024", "--max-num-seqs", "16"]
    args += ["--kv-cache-memory-bytes", str(CPU_KV_BYTES)]
    if num_workers(options.extra_args) == 1:
        args += ["--distributed-executor-backend", "uni"]
    if options.kv_tokens is not None:
        # One block of vLLM's is a placeholder that never holds tokens.
        args += ["--num-gpu-blocks-override", str(max(options.kv_tokens // CPU_BLOCK_SIZE, 1) + 1)]
    return args


def _vllm_environment(options: LaunchOptions, gpus: str | None) -> dict[str, str]:
    environ = {**_environment(options), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if options.dev_endpoints:
        environ["VLLM_SERVER_DEV_MODE"] = "1"
    if gpus is not None:
        return {**environ, "CUDA_VISIBLE_DEVICES": gpus}
    cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(_threads(options))}
    if num_workers(options.extra_args) == 1:
        cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {**environ, **cpu}


def _environment(options: LaunchOptions) -> dict[str, str]:
    environ = dict(os.environ)
    environ.pop("PYTHONPATH", None)  # ours; the engine has an environment of its own
    if Path(options.model or "").expanduser().is_dir():
        environ["HF_HUB_OFFLINE"] = "1"
    return environ


def _threads(options: LaunchOptions) -> int:
    return options.threads or max((os.cpu_count() or 1) // options.replicas, 1)


def _sglang_commands(options: LaunchOptions) -> list[Command]:
    program, is_own = find_sglang(options.executable)
    gpus = _gpus_for(options, is_own=is_own)
    return [_sglang_command(options, program, *one) for one in zip(gpus, _roles(options), strict=True)]


def _sglang_command(options: LaunchOptions, program: tuple[str, ...], gpus: str | None, role: Role) -> Command:
    ranks = num_ranks(options.extra_args)
    http, events, *more = free_ports(2 + 3 * ranks)
    replay, load = more[ranks - 1], more[2 * ranks - 1]  # each rank takes the port after the one before
    argv = [*program, "--model-path", str(options.model), "--host", "127.0.0.1", "--port", str(http)]
    argv += ["--page-size", str(SGLANG_PAGE_SIZE), "--enable-cache-report", "--enable-metrics"]
    argv += ["--kv-events-config", json.dumps(_kv_events(events, replay))]
    argv += ["--load-publish-endpoint", f"tcp://*:{load}"]
    if options.served_model_name is not None:
        argv += ["--served-model-name", options.served_model_name]
    if options.max_model_len is not None:
        argv += ["--context-length", str(options.max_model_len)]
    if role is not Role.MIXED:
        argv += _role_args(role, bootstrap_port=more[3 * ranks - 1], is_on_cpu=gpus is None)
    environ = _environment(options)
    kv_tokens = options.kv_tokens
    if gpus is None:
        argv += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16"]
        argv += ["--chunked-prefill-size", "1024", "--max-running-requests", "16", "--skip-server-warmup"]
        argv += ["--sleep-on-idle"]  # else its idle loop takes a whole core from the replicas beside it
        environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(_threads(options))}
        kv_tokens = kv_tokens or CPU_KV_TOKENS
    else:
        environ["CUDA_VISIBLE_DEVICES"] = gpus
    if kv_tokens is not None:
        argv += ["--max-total-tokens", str(kv_tokens)]
    # Its /health computes a token each time.
    return Command((*argv, *options.extra_args), environ, http, ready_path="/v1/models")


def _role_args(role: Role, *, bootstrap_port: int, is_on_cpu: bool) -> list[str]:
    args = ["--disaggregation-mode", role]
    if role is Role.PREFILL:
        args += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    if is_on_cpu:
        args += ["--disaggregation-transfer-backend", "nixl"]
        if role is Role.DECODE:  # its default is memory of CUDA
            args += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    return args


def _own_nixl() -> Path | None:
    """Return the folder of NIXL's packages that `dev/setup.py` has made, here or in a folder above."""
    here = Path.cwd()
    found = (one for folder in (here, *here.parents) for one in (folder / OWN_NIXL).glob("python*/site-packages"))
    return next(found, None)


def _gpus_for(options: LaunchOptions, *, is_own: bool) -> list[str | None]:
    """Return the GPUs of each replica, as CUDA_VISIBLE_DEVICES takes them; None for the CPU. Raises: ConfigError: too
    few.
    """
    on_cpu: list[str | None] = [None] * options.replicas
    if options.device == "cpu" or (options.device == "auto" and is_own):
        return on_cpu
    gpus = visible_gpus()
    if not gpus and options.device == "auto":
        return on_cpu
    return [*shared_out(gpus, options.replicas, num_workers(options.extra_args))]
