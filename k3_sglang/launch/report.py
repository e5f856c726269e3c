"""What was resolved, as rows for a table: first what is asked for, then what the running engine really has."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from k3_sglang.costs import total_parameters
from k3_sglang.launch.console import Row
from k3_sglang.launch.readiness import EngineFacts
from k3_sglang.launch.resolve import Resolved
from k3_sglang.launch.settings import LaunchSettings

KIB = 1024


def plan_rows(resolved: Resolved) -> list[Row]:
    """What will be started."""
    text = resolved.config.text
    kinds = f"{len(text.kda_layers)} KDA + {len(text.mla_layers)} MLA layers"
    return [
        ("model", f"{resolved.served_name} ({kinds}, {count(total_parameters(text))} parameters)"),
        ("checkpoint", str(resolved.model_dir)),
        ("device", f"{resolved.device}, {ranks(resolved)}{place(resolved)}"),
        ("context", f"{resolved.context_len} tokens"),
        (
            "turn grammar",
            "always (untrained weights)" if resolved.constrain else "only where a request needs it",
        ),
        ("API keys", keys(resolved.settings)),
    ]


def running_rows(resolved: Resolved, facts: EngineFacts) -> list[Row]:
    """What runs."""
    pools = facts.pools
    kv = f"{pools.get('kv_tokens')} tokens in pages of {pools.get('page_size')}{size(pools, 'kv_bytes')}"
    states = f"{pools.get('state_slots')} slots{size(pools, 'state_bytes_per_slot', ' each')}"
    model = facts.model
    running, asked = pools.get("max_running_requests"), resolved.max_running_requests
    capped = f" ({asked} asked for; the pools allow no more)" if asked is not None and running != asked else ""
    return [
        ("model class", f"{model.get('model_class')} ({model.get('dtype')} on {model.get('device')})"),
        ("images", images(resolved, facts)),
        ("attention", str(model.get("attention_backend"))),
        ("KV pool", kv),
        ("state pool", states),
        ("running requests", f"{running}{capped}"),
        ("prefix cache", resolved.settings.cache),
        ("cache strategy", str(facts.server.get("mamba_radix_cache_strategy"))),
        ("engine", resolved.engine_url),
        ("gateway", f"{resolved.gateway_url}/v1" if resolved.has_gateway else "not on this machine"),
    ]


def keys(settings: LaunchSettings) -> str:
    """Who may use the gateway."""
    if settings.api_keys_file is not None:
        return f"those of {settings.api_keys_file}"
    if settings.api_keys_env is not None:
        return f"those of the variable {settings.api_keys_env}"
    return "none: whoever reaches it may use it" if settings.allow_no_keys else "none: only this machine reaches it"


def place(resolved: Resolved) -> str:
    """Which part of a deployment this is, for the ready line; empty where there is only one."""
    settings = resolved.settings
    node = f" node={settings.node_rank}/{settings.nodes}" if settings.nodes > 1 else ""
    return node + (f" role={settings.disaggregation}" if settings.disaggregation != "none" else "")


def ranks(resolved: Resolved) -> str:
    """How many processes compute, and how experts are dealt out over them."""
    groups = f", whole experts in {resolved.settings.ep} groups" if resolved.settings.ep > 1 else ""
    stages = f" in each of {resolved.settings.pp} pipeline stages" if resolved.settings.pp > 1 else ""
    return f"{resolved.settings.tp} rank(s){stages}{groups}"


def images(resolved: Resolved, facts: EngineFacts) -> str:
    """Whether pictures are served, and the size of what encodes them."""
    if resolved.why_text_only is not None:
        return f"off: {resolved.why_text_only}"
    return f"on, encoder of {count(int(facts.model.get('image_parameters', 0)))} parameters"


def command_lines(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """A command a shell understands, one flag a line."""
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    text = " ".join([*words, *map(shlex.quote, command)])
    return text.replace(" --", " \\\n  --")


def count(value: int) -> str:
    """A parameter count for people: 5.2M, 2779.5B."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if value >= unit:
            return f"{value / unit:.1f}{name}"
    return str(value)


def size(values: Mapping[str, Any], key: str, suffix: str = "") -> str:
    """A byte count in binary units, or nothing when it was not announced."""
    amount = values.get(key)
    if not isinstance(amount, int):
        return ""
    scaled, unit = float(amount), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if scaled < KIB:
            break
        scaled, unit = scaled / KIB, larger
    return f" ({scaled:.1f} {unit}{suffix})"
