"""``python -m k3_sglang.launch plan``: arithmetic and rules for a machine or a configuration, nothing loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console

from k3_sglang.launch.feasibility import settings_conflicts, too_long, too_many_requests
from k3_sglang.launch.planner.choose import best
from k3_sglang.launch.planner.command import parser, plans_from_arguments, plans_from_file
from k3_sglang.launch.planner.report import as_json, print_plan
from k3_sglang.launch.settings import read_file, validate

EXIT_OK: Final = 0
EXIT_DOES_NOT_FIT: Final = 1
WIDTH: Final = 110


def plan(arguments: Sequence[str]) -> int:
    """Print a plan. Returns 0 when it fits, 1 when it does not or its flags are refused.

    Raises:
        SettingsError: arguments that cannot be used.
        SystemExit: ``--help``.
    """
    asked = parser().parse_args(arguments)
    if asked.config is None:
        plans, refused = plans_from_arguments(asked), []
    else:
        plans = plans_from_file(asked)
        settings = validate(read_file(Path(asked.config)), source=asked.config)
        refused = settings_conflicts(settings) + too_many_requests(settings, plans[0]) + too_long(plans[0])
    chosen = best(plans)
    chosen = replace(chosen, problems=(*chosen.problems, *refused))
    if asked.json:
        json.dump(as_json(chosen, plans), sys.stdout, indent=2)
        print()
    else:
        print_plan(chosen, plans, Console(width=WIDTH))
    return EXIT_OK if chosen.fits and not chosen.problems else EXIT_DOES_NOT_FIT
