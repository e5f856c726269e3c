"""Stage 1: what the user asked for. Flags override the YAML file, the file overrides defaults; unknown keys fail."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]
EngineValue = bool | int | float | str
GpuKind = Literal["h100", "h200", "b200", "gb200", "b300", "gb300", "mi350x", "mi355x"]
"""Kinds of GPU the planner knows (planner/hardware.py)."""


class SettingsError(ValueError):
    """A setting that cannot be used; the message is one line: the name, the value received, what is allowed."""


class LaunchSettings(BaseModel):
    """Everything a launch can be told. None means: decided in stage 2 from the model and the device."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str = Field(
        "tiny", description="`tiny`, `tiny-random` (untrained, built when missing) or the directory of a K3 checkpoint"
    )
    model_impl: Literal["auto", "plugin", "sglang"] = Field(
        "auto", description="model code: ours, SGLang's, or ours only where no GPU is used"
    )
    experts: Literal["auto", "packed", "unpacked", "fused"] = Field(
        "auto",
        description="routed experts in memory (our model code): as stored, or ready to multiply if that fits; "
        "on a GPU only fused, by SGLang's MXFP4 kernels",
    )
    served_name: str | None = Field(None, description="model name in API answers; default: the model's own name")
    host: str = Field("127.0.0.1", description="address the gateway listens on; the engine stays on loopback")
    api_keys_file: str | None = Field(
        None, description="file with the keys that may use the gateway, `name:key` or `key` a line"
    )
    api_keys_env: str | None = Field(None, description="environment variable with such lines, or separated by commas")
    allow_no_keys: bool = Field(
        False, description="listen without keys where others can reach the gateway; else that is refused"
    )
    port: Port = Field(30000, description="TCP port of the gateway; 0 picks a free one")
    engine_host: str = Field(
        "127.0.0.1", description="address the engine listens on; another only where a router must reach it"
    )
    engine_port: Port = Field(0, description="TCP port of the engine; 0 picks a free one")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto uses a GPU when the driver shows one")
    tp: Count = Field(1, description="tensor-parallel ranks")
    pp: Count = Field(1, description="pipeline stages, each with its part of the layers")
    ep: Count = Field(1, description="groups of ranks over which whole experts are dealt out; divides tp")
    attn_dp: Count = Field(1, description="groups of ranks that serve different requests; divides tp")
    dcp: Count = Field(1, description="ranks over which the latents of one request are dealt out; divides tp / attn_dp")
    gpu: GpuKind | None = Field(
        None, description="kind of GPU this is meant for: checked against the sizes before anything is loaded"
    )
    nodes: Count = Field(1, description="machines of this deployment; the launcher runs once on each")
    node_rank: Annotated[int, Field(ge=0)] = Field(
        0, description="which of them this is; the gateway runs on the first"
    )
    dist_init_addr: str | None = Field(None, description="HOST:PORT of the first machine, for the others to join")
    disaggregation: Literal["none", "prefill", "decode"] = Field(
        "none", description="this engine only reads prompts, or only writes answers; a router stands before both"
    )
    router_url: str | None = Field(
        None, description="router that the gateway sends requests to, instead of to this engine"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="type of weights and activations; auto: float32 on cpu, else the checkpoint's"
    )
    context_len: Count | None = Field(None, description="tokens a request may span; default: the model's maximum")
    max_running_requests: Count | None = Field(None, description="requests decoded together")
    kv_tokens: Count | None = Field(None, description="size of the KV pool in tokens")
    state_slots: Count | None = Field(None, description="size of the recurrent-state pool in slots")
    page_size: Count | None = Field(None, description="tokens per KV page; prefixes match in whole pages")
    chunked_prefill_tokens: Count | None = Field(None, description="most tokens computed in one prefill step")
    overlap: Literal["auto", "on", "off"] = Field(
        "auto", description="prepare the next step while one runs; auto: on a GPU only"
    )
    cache: Literal["k3", "sglang"] = Field(
        "k3", description="who decides which prefixes stay reusable: our checkpoint cache, or SGLang's own"
    )
    cut_cost_tokens: Count | None = Field(
        None, description="cache k3: prompt tokens one more prefill step is worth; a cut that saves less is not made"
    )
    checkpoint_format: Literal["state", "bfloat16", "int8"] = Field(
        "state", description="cache k3: how kept states are stored; state: as those of running requests, in their pool"
    )
    checkpoint_slots: Count | None = Field(
        None, description="size of the pool of kept states, when checkpoint_format is not state"
    )
    cache_hints: Literal["on", "off"] = Field(
        "on", description="cache k3: the gateway tells it of sessions and shared positions; the speed only changes"
    )
    cache_routes: Literal["on", "off"] = Field(
        "on", description="the gateway serves the routes that show and steer the cache, to whoever reaches it"
    )
    inspector: Literal["auto", "on", "off"] = Field(
        "auto", description="the gateway's web page of sessions, prompts and checkpoints; auto: on a loopback host only"
    )
    inspector_content: Literal["on", "off"] = Field("on", description="it shows prompts and answers too")
    fixed_sampling: Literal["on", "off"] = Field(
        "off", description="requests may not change how is sampled, nor choose n, as on Moonshot's own API"
    )
    constrain: Literal["auto", "on", "off"] = Field(
        "auto", description="always decode under a turn grammar; auto: only for untrained weights"
    )
    allow_image_files: list[str] = Field(
        default_factory=list[str], description="folders whose files clients may send as file:// images (file only)"
    )
    allow_image_hosts: list[str] = Field(
        default_factory=list[str], description="hosts that http(s) images are fetched from (file only)"
    )
    guard: Literal["repair", "strict", "off"] = Field(
        "repair", description="histories that lost thinking: put right, refused with 409, or told of only"
    )
    ledger: str | None = Field(
        None, description="file that keeps every request and answer, content included; without it memory only"
    )
    ledger_shared: Literal["on", "off"] = Field(
        "off", description="several gateways of this machine write to the ledger, and each knows the turns of all"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("warning", description="of engine and gateway")
    log_format: Literal["text", "json"] = Field(
        "text", description="lines of standard error: for people, or one JSON object a line"
    )
    log_dir: str | None = Field(None, description="folder for engine.log and gateway.log, besides the console")
    start_timeout_s: Count = Field(600, description="seconds until a server that is not ready is given up")
    stop_grace_s: Count = Field(15, description="seconds running requests get to finish when stopping")
    drain_notice_s: int = Field(
        0, ge=0, description="seconds an idle gateway stays when stopping, so that balancers see it is not ready"
    )
    metrics: Literal["on", "off"] = Field("on", description="the gateway serves /metrics, to whoever reaches it")
    engine: dict[str, EngineValue] = Field(
        default_factory=dict[str, EngineValue],
        description="further SGLang flags by their long name without dashes (file only); true gives a bare flag",
    )
    environment: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="further environment variables of the engine (file only)",
    )

    gateway: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="further settings of the gateway, by their names (file only), for instance max_running_per_key",
    )


FILE_ONLY = frozenset({"engine", "environment", "gateway", "allow_image_files", "allow_image_hosts"})
"""Settings that are no single value and so have no flag."""


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    settings: LaunchSettings
    dry_run: bool
    """Print the engine's command and stop."""


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line and the file it names.

    Raises:
        SettingsError: unknown flag or key, value out of range, unreadable file.
        SystemExit: ``--help`` (code 0).
    """
    namespace, unknown = _parser().parse_known_args(arguments)
    if unknown:
        flags = [f"--{name.replace('_', '-')}" for name in LaunchSettings.model_fields if name not in FILE_ONLY]
        raise SettingsError(f"command line: unknown argument {unknown[0]!r}; {_nearest(unknown[0], flags)}")
    given = vars(namespace)
    dry_run = bool(given.pop("dry_run"))
    file: str | None = given.pop("config", None)
    from_file = read_file(Path(file)) if file is not None else {}
    if file is not None:
        validate(from_file, source=file)  # so that a mistake in the file is reported as one, even when overridden
    return Request(validate({**from_file, **given}, source="command line"), dry_run)


def validate(values: Mapping[str, Any], source: str) -> LaunchSettings:
    """Build settings from plain values.

    Raises:
        SettingsError: naming the source, the key, the value and what is allowed.
    """
    known = sorted(LaunchSettings.model_fields)
    for key in values:
        if key not in known:
            raise SettingsError(f"{source}: unknown key {key!r}; {_nearest(key, known)}")
    try:
        return LaunchSettings.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        if path[0] in ("engine", "environment") and len(path) > 1:
            kinds = "true, a number or text" if path[0] == "engine" else "text (write numbers in quotes)"
            where, allowed = f"{path[0]}.{path[1]}", f"it must be {kinds}"
        else:
            where, allowed = path[0], first["msg"].lower()
        raise SettingsError(f"{source}: {where} is {first['input']!r}; {allowed}") from error


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"allowed: {', '.join(known)}"


def read_file(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; a key given twice is an error.

    Raises:
        SettingsError: missing file, bad YAML, not a mapping.
    """
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise SettingsError(
            f"cannot read config file {path}: {error.strerror}; give the path of a YAML file"
        ) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are not UTF-8, a date that does not exist
        raise SettingsError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise SettingsError(f"{path} holds a {type(loaded).__name__}; it must be a mapping of settings, `key: value`")
    return {str(key): value for key, value in cast("dict[object, Any]", loaded).items()}


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys; here the second is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return cast("dict[Any, Any]", super().construct_mapping(node, deep=deep))


class _Parser(argparse.ArgumentParser):
    """argparse prints a usage block and exits; here a mistake is one line like every other."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"command line: {message}; --help lists the flags")


def _parser() -> argparse.ArgumentParser:
    """One flag per field, so that flags and file keys cannot drift apart."""
    parser = _Parser(
        prog="python -m k3_sglang.launch",
        description="Serve Kimi K3: starts the SGLang engine and the gateway, says `ready`, stops both on Ctrl-C.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with these settings; flags override it")
    parser.add_argument(
        "--dry-run", action="store_true", default=False, help="print the commands, ask SGLang about them, and stop"
    )
    for name, field in LaunchSettings.model_fields.items():
        if name in FILE_ONLY:
            continue
        options = _flag_type(field.annotation)
        default = "" if field.default is None else f" (default: {field.default})"
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"{field.description}{default}", **options)
    return parser


def _flag_type(annotation: Any) -> dict[str, Any]:
    """argparse's ``type`` and ``choices`` for a field's type."""
    alternatives: list[Any] = [part for part in get_args(annotation) if part is not NoneType]
    plain: Any = alternatives[0] if alternatives and get_origin(annotation) is not Literal else annotation
    if get_origin(plain) is Literal:
        return {"choices": list(get_args(plain))}
    if plain is bool:
        return {"action": "store_true"}
    if get_origin(plain) is Annotated:
        plain = get_args(plain)[0]
    return {"type": plain, "metavar": "N" if plain is int else "TEXT"}
