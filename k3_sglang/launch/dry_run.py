"""What ``--dry-run`` prints: commands of every machine, of gateway and router, and what SGLang says to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from k3_sglang.launch import command, report
from k3_sglang.launch.flags import Answer, ask, task_of
from k3_sglang.launch.resolve import Resolved, reachable

BOOTSTRAP_PORT: Final = 8998
"""SGLang's default of ``--disaggregation-bootstrap-port``."""


def text(resolved: Resolved, base: Mapping[str, str]) -> str:
    """Commands that a shell takes, each below a comment that says where it runs."""
    settings = resolved.settings
    parts: list[str] = []
    for rank in range(settings.nodes):
        here = replace(resolved, settings=settings.model_copy(update={"node_rank": rank}))
        where = f", node {rank} of {settings.nodes}" if settings.nodes > 1 else ""
        role = f", {settings.disaggregation} only" if settings.disaggregation != "none" else ""
        lines = report.command_lines(command.engine_command(here), command.engine_environment(here, base))
        parts.append(f"# engine{where}{role}\n{lines}")
    if resolved.has_gateway:
        gateway = json.dumps(command.gateway_settings(resolved), ensure_ascii=False)
        parts.append(f"# gateway, on the first machine; its settings are {gateway}\n" + gateway_line(resolved))
    if settings.disaggregation == "decode":
        parts.append("# router, on any machine that reaches both engines\n" + router_line(resolved))
    return "\n\n".join(parts)


def gateway_line(resolved: Resolved) -> str:
    """The gateway's command; the launcher writes the settings file and removes it at the end."""
    return report.command_lines(command.gateway_command(resolved, Path("gateway.json")), {})


def router_line(resolved: Resolved) -> str:
    """The router of a disaggregated deployment.

    SGLang's router (``pip install sglang-router``; 0.3.2 was tried) in its mini form, which passes ``/generate`` on as
    it came. Its full form writes the body anew and drops what it does not know: turn grammars and cache hints.
    """
    port = resolved.settings.engine.get("disaggregation-bootstrap-port", BOOTSTRAP_PORT)
    listen = (resolved.settings.router_url or "").rpartition(":")[2].strip("/") or "8000"
    words = ["python", "-m", "sglang_router.launch_router", "--mini-lb", "--pd-disaggregation"]
    words += ["--prefill", "http://PREFILL_HOST:PREFILL_PORT", str(port)]
    host = resolved.settings.engine_host
    decode = "DECODE_HOST" if host in ("0.0.0.0", "::") else reachable(host)
    words += ["--decode", f"http://{decode}:{resolved.engine_port}", "--host", "0.0.0.0", "--port", listen]
    return report.command_lines(words, {})


def judge(resolved: Resolved) -> Answer:
    """SGLang's own verdict on the engine's arguments.

    Raises:
        RuntimeError: it cannot be asked.
    """
    return ask([task_of(resolved)])[0]


def verdict(answer: Answer) -> str:
    """What SGLang made of the arguments, in one line."""
    shown = (
        "attention_backend",
        "moe_runner_backend",
        "page_size",
        "mem_fraction_static",
        "max_running_requests",
    )
    facts = ", ".join(f"{name} {answer.resolved[name]}" for name in shown if answer.resolved.get(name) is not None)
    return f"SGLang takes these arguments and resolves them to {facts}"
