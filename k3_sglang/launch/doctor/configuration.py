"""The settings: whatever a launch with them would refuse, asked of the launcher's own stages."""

from __future__ import annotations

import os

from k3_sglang.launch import command, feasibility, preflight
from k3_sglang.launch.doctor.findings import Finding, from_line, ok
from k3_sglang.launch.resolve import resolve
from k3_sglang.launch.settings import LaunchSettings, SettingsError

AREA = "settings"


def look(settings: LaunchSettings, *, has_model: bool) -> list[Finding]:
    """All findings about settings; those about software, ports and weights are told with these.

    Args:
        has_model: whether the model's folder can be read; without it only rules over flags are asked.
    """
    try:
        lines = feasibility.settings_conflicts(settings)
        if has_model:
            lines += refusals(settings)
    except SettingsError as error:
        lines = [str(error)]
    if lines:
        return [from_line(AREA, line) for line in dict.fromkeys(lines)]
    return [ok(AREA, "a launch takes them")] if has_model else []


def refusals(settings: LaunchSettings) -> list[str]:
    """What resolving, the rules and the gateway refuse.

    Raises:
        SettingsError: the first setting that cannot be used.
    """
    resolved = resolve(settings)
    command.engine_environment(resolved, os.environ)
    found = feasibility.problems(resolved)
    found += preflight.check_image_folders(settings.allow_image_files)
    found += preflight.check_ledger(settings.ledger)
    if resolved.has_gateway:
        found += preflight.check_gateway(command.gateway_settings(resolved))
    return found
