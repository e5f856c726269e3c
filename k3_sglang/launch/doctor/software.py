"""Software of this environment: Python, SGLang at its pinned version, torch with its CUDA, kernels, our plugin."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from k3_sglang.compat import SGLANG_VERSION
from k3_sglang.launch import preflight
from k3_sglang.launch.doctor.findings import Finding, blocks, from_line, note, ok

PYTHON: Final = (3, 11)
PROBE_TIMEOUT_S: Final = 300
DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")

KERNELS: Final = {
    "sglang-kernel": "kernels of SGLang",
    "flashinfer-python": "attention and MXFP4 experts on Blackwell",
    "triton": "KDA, and kernels compiled at first use",
    "sgl-deep-gemm": "deep_gemm experts, MegaMoE",
}
"""Distributions that a GPU launch uses; the extra `serve` brings them."""

TRANSPORTS: Final = {"nixl": "nixl", "mooncake": "mooncake-transfer-engine"}
"""Of disaggregation: value of ``disaggregation-transfer-backend`` and the distribution that has it."""

MODULES: Final = ("torch", "transformers", "xgrammar", "tiktoken", "sglang")
"""What the engine imports first; each is really imported, in a process of its own."""

PROBE: Final = """
import json, sys
found = {}
for name in sys.argv[1:]:
    try:
        __import__(name)
        found[name] = None
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
if found.get("torch", "") is None:
    import torch
    found["cuda"] = [torch.version.cuda, torch.version.hip, torch.cuda.is_available()]
print(json.dumps(found))
"""

Version = Callable[[str], str]


def look(device: str, transport: str | None = None, *, modules: tuple[str, ...] = MODULES) -> list[Finding]:
    """All findings about software.

    Args:
        device: ``cpu`` or ``cuda``.
        transport: of disaggregation, if it is used.
        modules: what is imported to see that it can be.
    """
    found = [python(), *(from_line("sglang", line) for line in preflight.check_sglang())]
    if len(found) == 1:
        found.append(ok("sglang", f"sglang {SGLANG_VERSION}, the version this package was checked on"))
    plugin = preflight.check_entry_points(importlib.metadata.entry_points)
    plugin += preflight.check_environment(os.environ, device)
    found += [from_line("plugin", line) for line in plugin] or [ok("plugin", "both entry points lead to this package")]
    found += imports(modules, device)
    if device == "cuda":
        found += kernels(importlib.metadata.version)
        found.append(driver())
    if transport is not None:
        found += transport_package(transport, importlib.metadata.version)
    return found


def python() -> Finding:
    """SGLang's pinned version is published for one Python."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] != PYTHON:
        wanted = ".".join(map(str, PYTHON))
        fix = f"make an environment with Python {wanted}: sglang {SGLANG_VERSION} is published for it alone"
        return blocks("python", f"Python {version}", fix)
    return ok("python", f"Python {version}")


def imports(modules: tuple[str, ...], device: str) -> list[Finding]:
    """Whether the engine's modules can be imported, and which CUDA torch is built for."""
    command = [sys.executable, "-W", "ignore", "-c", PROBE, *modules]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, IndexError, ValueError) as error:
        fix = "import them by hand and look at the message: " + ", ".join(modules)
        return [blocks("imports", f"the engine's modules could not be tried: {error}", fix)]
    cuda = found.pop("cuda", None)
    remedy = "install the extra `serve` of this package again (`pip install -e .[serve]`, or `make venv`)"
    broken = [
        blocks("imports", f"{name} cannot be imported: {error}", remedy) for name, error in found.items() if error
    ]
    result = broken or [ok("imports", f"{', '.join(modules)} can be imported")]
    if device == "cuda" and cuda is not None and not cuda[2]:
        built = f"CUDA {cuda[0]}" if cuda[0] else f"ROCm {cuda[1]}" if cuda[1] else "CPUs only"
        fix = "check the driver (nvidia-smi, rocm-smi), CUDA_VISIBLE_DEVICES, and that torch is built for this machine"
        result.append(blocks("torch", f"torch, built for {built}, sees no GPU", fix))
    return result


def kernels(version: Version) -> list[Finding]:
    """Kernel packages and their versions."""
    found: list[Finding] = []
    for name, purpose in KERNELS.items():
        try:
            found.append(ok("kernels", f"{name} {version(name)} ({purpose})"))
        except importlib.metadata.PackageNotFoundError:
            fix = "install the extra `serve` of this package again"
            found.append(blocks("kernels", f"{name} is not installed ({purpose})", fix))
    return found


def transport_package(transport: str, version: Version) -> list[Finding]:
    """The package that carries states and latents between engines."""
    name = TRANSPORTS.get(transport)
    if name is None:
        return []
    try:
        return [ok("transport", f"{name} {version(name)}")]
    except importlib.metadata.PackageNotFoundError:
        return [blocks("transport", f"{name} is not installed", f"pip install {name} on every machine of both roles")]


def driver() -> Finding:
    """The NVIDIA driver's version, where there is one."""
    try:
        line = DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        fix = "nothing to do on AMD; on NVIDIA install the driver and see that nvidia-smi answers"
        return note("driver", "no NVIDIA driver is loaded", fix)
    return ok("driver", line.removeprefix("NVRM version:").strip())
