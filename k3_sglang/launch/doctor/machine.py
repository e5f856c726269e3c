"""The machine: GPUs of the kind that is meant, memory, disk, ports, and limits that big servers run into."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Final

from k3_sglang.launch import preflight
from k3_sglang.launch.doctor.findings import Finding, blocks, note, ok
from k3_sglang.launch.planner.hardware import GIB
from k3_sglang.launch.resolve import gpu_devices
from k3_sglang.launch.settings import LaunchSettings

MIN_OPEN_FILES: Final = 4096
MIN_SHARED_GIB: Final = 8
"""Of /dev/shm: NCCL between processes of a machine; containers often have 64 MiB."""
MIN_FREE_DISK_GIB: Final = 20
"""Beside the checkpoint: compiled kernels, logs, the ledger."""
CPU_FACTOR: Final = 1.5
"""Memory that a CPU launch takes beyond the weight files: buffers of both servers, experts unpacked one at a time."""
MEMORY_FILE: Final = Path("/proc/meminfo")
SHARED_FOLDER: Final = Path("/dev/shm")


def look(settings: LaunchSettings, device: str, weight_bytes: int) -> list[Finding]:
    """All findings about this machine."""
    found = [memory(device, weight_bytes), disk(Path(settings.ledger or ".")), open_files()]
    found += ports(settings)
    if device == "cuda":
        found += [gpus(settings), shared_memory()]
    return found


def gpus(settings: LaunchSettings) -> Finding:
    """The driver shows a GPU for every rank of this machine."""
    needed, there = settings.tp * settings.pp // settings.nodes, gpu_devices()
    problems = preflight.check_devices("cuda", needed, there)
    if problems:
        text, _, fix = problems[0].partition("; ")
        return blocks("gpus", text, fix)
    return ok("gpus", f"{there} GPUs for {needed} ranks")


def memory(device: str, weight_bytes: int, file: Path = MEMORY_FILE) -> Finding:
    """Memory that is available; a CPU launch holds the model in it, a GPU launch the pages of files being read."""
    try:
        lines = dict(line.split(":", 1) for line in file.read_text(encoding="utf-8").splitlines() if ":" in line)
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError) as error:
        return note("memory", f"{file} could not be read ({error!r})", "see that there is enough memory yourself")
    text = f"{available / GIB:.1f} GiB available"
    needed = weight_bytes * CPU_FACTOR
    if device == "cpu" and available < needed:
        fix = "stop other programs, keep experts packed (--experts packed), or use a machine with more memory"
        return blocks("memory", f"{text}, {needed / GIB:.1f} GiB wanted for these weights on a CPU", fix)
    return ok("memory", text)


def disk(where: Path, free_bytes: int | None = None) -> Finding:
    """Room for compiled kernels, logs and the ledger."""
    folder = next(path for path in (where.absolute(), *where.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    if free < MIN_FREE_DISK_GIB * GIB:
        fix = f"free {MIN_FREE_DISK_GIB} GiB, or name another place for the ledger and logs"
        return note("disk", f"{free / GIB:.1f} GiB free below {folder}", fix)
    return ok("disk", f"{free / GIB:.1f} GiB free below {folder}")


def ports(settings: LaunchSettings) -> list[Finding]:
    """The ports that are named can be bound."""
    wanted = [("port", settings.host, settings.port), ("engine_port", settings.engine_host, settings.engine_port)]
    found: list[Finding] = []
    for name, host, port in wanted:
        if port == 0:
            continue
        problems = preflight.check_port(name, host, port)
        if problems:
            text, _, fix = problems[0].partition("; ")
            found.append(blocks("ports", text, fix))
        else:
            found.append(ok("ports", f"{name} {port} on {host} is free"))
    return found


def open_files() -> Finding:
    """How many files a process may open: each streamed request takes several."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        fix = f"run `ulimit -n {min(hard, 65536)}` in the shell that starts the launcher"
        return note("limits", f"at most {soft} open files", fix)
    return ok("limits", f"at most {soft} open files")


def shared_memory(folder: Path = SHARED_FOLDER, size_bytes: int | None = None) -> Finding:
    """Room in /dev/shm; ranks of a machine talk through it."""
    if size_bytes is None:
        if not os.path.isdir(folder):
            return blocks("shared memory", f"{folder} is not there", "mount a tmpfs there")
        size_bytes = shutil.disk_usage(folder).total
    text = f"{size_bytes / GIB:.1f} GiB of {folder}"
    if size_bytes < MIN_SHARED_GIB * GIB:
        return note("shared memory", text, f"give the container --shm-size {MIN_SHARED_GIB}g or --ipc=host")
    return ok("shared memory", text)
