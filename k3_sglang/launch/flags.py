"""Whether SGLang takes the arguments of a launch: asked of SGLang itself, in a subprocess, before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from k3_sglang.launch.command import engine_command, engine_environment
from k3_sglang.launch.planner.hardware import DEVICE_MAJOR, Gpu, find_gpu
from k3_sglang.launch.resolve import Resolved

PROGRAM: Final = "k3_sglang.flag_check"
TIMEOUT_S: Final = 1200
ENGINE_WORDS: Final = 3
"""Words of the engine's command before its arguments."""


@dataclass(frozen=True)
class Answer:
    """What SGLang says to one list of arguments."""

    error: str | None
    resolved: Mapping[str, Any]
    """Some of its arguments after its own rules (``flag_check.RESOLVED``)."""


def machine_of(gpu: Gpu) -> dict[str, Any]:
    """What SGLang's rules ask about a machine with such GPUs."""
    family = gpu.family
    return {
        "is_cuda": not gpu.is_amd,
        "is_hip": gpu.is_amd,
        "is_sm90": family == "sm90",
        "is_sm100": family in ("sm100", "sm103"),
        "is_sm100_or_sm110": family in ("sm100", "sm103"),
        "is_sm120": False,
        "is_blackwell": family in ("sm100", "sm103"),
        "is_hopper_with_cuda_12_3": family == "sm90",
        "has_flashinfer": not gpu.is_amd,
        "device_sm": 0 if gpu.is_amd else int(family.removeprefix("sm")),
        "device_capability": DEVICE_MAJOR[family],
    }


def task_of(resolved: Resolved) -> dict[str, Any]:
    """A launch as a question for SGLang; without a named GPU its rules run as on this machine."""
    gpu = find_gpu(resolved.settings.gpu) if resolved.settings.gpu is not None and resolved.device == "cuda" else None
    environment = engine_environment(resolved, os.environ)
    environment.pop("PATH", None)
    return {
        "arguments": engine_command(resolved)[ENGINE_WORDS:],
        "machine": None if gpu is None else machine_of(gpu),
        "memory_mib": None if gpu is None else gpu.memory_mib,
        "environment": environment,
    }


def ask(tasks: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """SGLang's answers, in order; tasks for GPUs and for CPUs are asked in a process each.

    Raises:
        RuntimeError: SGLang cannot be asked; the message holds the end of what it printed.
    """
    answers: dict[int, Answer] = {}
    for pretended in (False, True):
        numbers = [number for number, task in enumerate(tasks) if bool(task["machine"]) is pretended]
        if numbers:
            found = _run([tasks[number] for number in numbers], pretended=pretended)
            answers.update(zip(numbers, found, strict=True))
    return [answers[number] for number in range(len(tasks))]


def _run(tasks: Sequence[Mapping[str, Any]], *, pretended: bool) -> list[Answer]:
    # As on a GPU: our CPU platform, which would answer for this machine, stays away.
    environment = {**os.environ, **tasks[0]["environment"]}
    if pretended:
        environment |= {"SGLANG_PLUGINS": "k3_sglang", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-m", PROGRAM]
    done = subprocess.run(
        command,
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
        env=environment,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError("SGLang's argument parser could not be asked: " + "\n".join(done.stderr.splitlines()[-5:]))
    return [Answer(item["error"], item["resolved"]) for item in json.loads(done.stdout)]
