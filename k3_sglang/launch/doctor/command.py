"""``python -m k3_sglang.launch doctor``: looks, tells what it found and what to do, ends with 1 if something blocks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, NoReturn

from rich.console import Console
from rich.text import Text

from k3_sglang.launch.doctor import checkpoint, configuration, machine, software
from k3_sglang.launch.doctor.findings import Finding, blocks, note
from k3_sglang.launch.resolve import resolve_device, resolve_model
from k3_sglang.launch.settings import LaunchSettings, SettingsError, read_file, validate

EXIT_OK: Final = 0
EXIT_BLOCKED: Final = 1
MARKS: Final = {"ok": ("ok", "green"), "note": ("note", "yellow"), "blocks": ("BLOCKS", "bold red")}
AREA_WIDTH: Final = 14


def doctor(arguments: Sequence[str]) -> int:
    """Look and tell. Returns 0, or 1 when something blocks.

    Raises:
        SettingsError: arguments that cannot be used.
        SystemExit: ``--help``.
    """
    asked = _parser().parse_args(arguments)
    values = read_file(Path(asked.config)) if asked.config is not None else {}
    given = {name: value for name in ("model", "device", "port") if (value := getattr(asked, name)) is not None}
    settings = validate({**values, **given}, source=asked.config or "command line")
    console = Console(stderr=True, highlight=False)
    found = look(settings, hashes=not asked.no_hashes, console=console)
    if asked.json:
        body = {"blocked": any(one.level == "blocks" for one in found), "findings": [asdict(one) for one in found]}
        json.dump(body, sys.stdout, indent=2)
        print()
    else:
        _print(found)
    return EXIT_BLOCKED if any(one.level == "blocks" for one in found) else EXIT_OK


def look(settings: LaunchSettings, *, hashes: bool, console: Console) -> list[Finding]:
    """All findings for a launch with these settings on this machine."""
    device = resolve_device(settings.device)
    transport = settings.engine.get("disaggregation-transfer-backend", "mooncake")
    used = str(transport) if settings.disaggregation != "none" else None
    found = software.look(device, used)
    weight_bytes = 0
    try:
        directory = resolve_model(settings.model)
    except SettingsError as error:
        model = [blocks("checkpoint", str(error), "give the folder of the checkpoint with --model")]
    else:
        weight_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        model = checkpoint.look(directory, hashes=hashes, progress=lambda text: console.print(f"doctor: {text}"))
    has_model = not any(one.area == "checkpoint" and one.level == "blocks" for one in model)
    found += [*configuration.look(settings, has_model=has_model), *model]
    found += machine.look(settings, device, weight_bytes)
    if device == "cpu" and settings.device == "auto":
        text = "no GPU is visible, so the launch would run on the CPU"
        found.append(note("gpus", text, "check nvidia-smi and CUDA_VISIBLE_DEVICES if there should be one"))
    return found


def _print(found: Sequence[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for one in found:
        word, style = MARKS[one.level]
        line = Text(f"{word:<7}", style=style)
        line.append(f" {one.area:<{AREA_WIDTH}} {one.text}", style="default")
        console.print(line)
        if one.fix:
            console.print(f"{'':<{AREA_WIDTH + 9}}-> {one.fix}", markup=False)
    blocked = sum(one.level == "blocks" for one in found)
    console.print(f"{blocked} finding(s) block the launch" if blocked else "nothing blocks the launch")


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, as everywhere in the launcher."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"doctor: {message}; --help lists the flags")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m k3_sglang.launch doctor",
        description="Look at software, machine, settings and checkpoint of a launch; nothing is started or changed.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="launch configuration to look at")
    parser.add_argument("--model", metavar="DIR", help="checkpoint folder; overrides the configuration")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="overrides the configuration")
    parser.add_argument("--port", type=int, metavar="N", help="overrides the configuration")
    parser.add_argument("--no-hashes", action="store_true", help="do not read weight files whole to compare hashes")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    return parser
