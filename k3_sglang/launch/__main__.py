"""``python -m k3_sglang.launch``: serve Kimi K3 with one command."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from k3_sglang.launch import command, console, dry_run, feasibility, preflight, report
from k3_sglang.launch.doctor.command import doctor
from k3_sglang.launch.notify import READY, tell_systemd
from k3_sglang.launch.plan_command import plan
from k3_sglang.launch.processes import adopt_orphans
from k3_sglang.launch.readiness import EngineFacts
from k3_sglang.launch.resolve import Resolved, resolve
from k3_sglang.launch.settings import SettingsError, parse
from k3_sglang.launch.supervisor import EXIT_INTERRUPTED_START, Program, Servers, Supervisor

EXIT_USAGE = 2

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"plan": plan, "doctor": doctor}
"""What else can be asked for: arithmetic, looks; without one of these words it serves."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, resolve, check, serve. Returns the exit code: 0 stopped on request, 1 a server failed, 2 bad settings."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given and given[0] in COMMANDS:
            return COMMANDS[given[0]](given[1:])
        request = parse(given)
        resolved = resolve(request.settings)
        command.engine_environment(resolved, os.environ)  # may refuse
        impossible = feasibility.problems(resolved)
        for problem in impossible:
            print(f"launch: error: {problem}", file=sys.stderr)
        if impossible:
            return EXIT_USAGE
        found = preflight.problems(resolved)
        for problem in found:
            print(f"launch: {'warning' if request.dry_run else 'error'}: {problem}", file=sys.stderr)
        if request.dry_run:
            print(dry_run.text(resolved, os.environ), flush=True)
            return judged(resolved)
        if found:
            return EXIT_USAGE
        with (
            console.opened(
                request.settings.log_dir, ("engine", "gateway"), as_json=request.settings.log_format == "json"
            ) as output,
            tempfile.TemporaryDirectory(prefix="k3-sglang-") as folder,
        ):
            output.table(report.plan_rows(resolved))
            return serve(resolved, Path(folder), output)
    except SettingsError as error:
        print(f"launch: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:  # before the supervisor listens for it, for instance while the tiny model is built
        return EXIT_INTERRUPTED_START


def judged(resolved: Resolved) -> int:
    """Tell what SGLang says to a dry run's arguments, if it is installed. Returns the exit code."""
    if preflight.check_sglang():
        return 0
    try:
        answer = dry_run.judge(resolved)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"launch: warning: {error}", file=sys.stderr)
        return 0
    if answer.error is not None:
        print(f"launch: error: SGLang refuses these arguments: {answer.error}", file=sys.stderr)
        return EXIT_USAGE
    print(f"launch: {dry_run.verdict(answer)}", file=sys.stderr)
    return 0


def serve(resolved: Resolved, folder: Path, output: console.Console) -> int:
    """Run both servers; ``folder`` holds the gateway's settings and the announcements while they run."""
    settings_file = folder / "gateway.json"
    settings_file.write_text(json.dumps(command.gateway_settings(resolved), indent=2), encoding="utf-8")
    announce_dir = folder / "announcements"
    announce_dir.mkdir()
    own = command.without_keys(os.environ, resolved.settings)
    engine_environment = {**own, **command.engine_environment(resolved, os.environ)}
    adopt_orphans()
    gateway = Program(
        "gateway", command.gateway_command(resolved, settings_file), os.environ, f"{resolved.gateway_url}/health"
    )
    servers = Servers(
        engine=Program(
            "engine",
            command.engine_command(resolved),
            command.with_announcements(engine_environment, announce_dir),
            f"{resolved.engine_url}/health",
        ),
        gateway=gateway if resolved.has_gateway else None,
        engine_url=resolved.engine_url,
        announce_dir=announce_dir,
        own_model=resolved.own_model,
        images=resolved.why_text_only is None,
        device=resolved.device,
        start_timeout_s=resolved.settings.start_timeout_s,
        stop_grace_s=resolved.settings.stop_grace_s,
        own_cache=resolved.settings.cache == "k3",
        answers=resolved.settings.node_rank == 0,
    )

    def on_ready(facts: EngineFacts, seconds: float) -> None:
        output.table(report.running_rows(resolved, facts))
        tell_systemd(READY)
        where = f"{resolved.gateway_url}/v1" if resolved.has_gateway else resolved.engine_url
        place = report.place(resolved)
        output.ready(f"{where} model={resolved.served_name} device={resolved.device}{place} in {seconds:.1f} s")

    return asyncio.run(Supervisor(servers, output).run(on_ready))


if __name__ == "__main__":
    sys.exit(main())
