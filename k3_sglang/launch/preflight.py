"""Stage 3: what can be known to fail before anything is started; every finding is one line with its remedy.

SGLang skips a broken plugin with a log line, so the plugin is looked at here: installed at all, from this package, and
each entry point names something that exists. That it also runs is announced later from inside the engine.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import k3_sglang
from k3_sglang.chat.tokenizer import VOCABULARY_FILE
from k3_sglang.compat import SGLANG_VERSION
from k3_sglang.launch.command import gateway_settings
from k3_sglang.launch.resolve import Resolved, bind_once, gpu_devices
from k3_sglang.loading.headers import checkpoint_problems

ENTRY_POINTS = {"sglang.srt.plugins": "k3_sglang", "sglang.srt.platforms": "k3_sglang_cpu"}
"""Entry point group and the name this package registers there."""

SAFETENSORS_FORMATS = ("auto", "safetensors")
"""Values of SGLang's ``load-format`` with which the weights are the checkpoint's safetensors files."""

GATEWAY_CHECK_S = 120
"""Most seconds the gateway may take to look at its settings."""

REINSTALL = "install this package again (`pip install -e .` in the clone, or `make venv`)"


def problems(resolved: Resolved) -> list[str]:
    """Everything that would make this launch fail; empty when it may start."""
    return [
        *check_sglang(),
        *check_entry_points(importlib.metadata.entry_points),
        *check_devices(resolved.device, resolved.processes_here, gpu_devices()),
        *check_environment(os.environ, resolved.device),
        *check_checkpoint(
            resolved.model_dir,
            weights=resolved.settings.engine.get("load-format", "auto") in SAFETENSORS_FORMATS,
            images=resolved.why_text_only is None,
        ),
        *check_image_folders(resolved.settings.allow_image_files),
        *check_ledger(resolved.settings.ledger),
        *(check_gateway(gateway_settings(resolved)) if resolved.has_gateway else []),
        *(check_port("port", resolved.settings.host, resolved.gateway_port) if resolved.has_gateway else []),
        *check_port("engine_port", resolved.settings.engine_host, resolved.engine_port),
    ]


def check_devices(device: str, ranks: int, gpus: int) -> list[str]:
    """The driver shows a GPU for every rank."""
    if device != "cuda" or gpus >= ranks:
        return []
    return [
        f"device is 'cuda' with {ranks} rank(s) on this machine, but the driver shows {gpus} usable GPU(s); "
        "lower tp or pp, check nvidia-smi (rocm-smi) and CUDA_VISIBLE_DEVICES, or use --device cpu"
    ]


def check_image_folders(folders: Iterable[str]) -> list[str]:
    """Folders that images may come from are there; the gateway, which starts last, would refuse others."""
    return [
        f"allow_image_files names {folder!r}, which is no absolute path of a folder; correct it or take it out"
        for folder in folders
        if not (Path(folder).is_absolute() and Path(folder).is_dir())
    ]


def check_ledger(path: str | None) -> list[str]:
    """The ledger is a file that can be written; the gateway, which starts last, would refuse another."""
    if path is None:
        return []
    file = Path(path).absolute()
    there = next(folder for folder in (file, *file.parents) if folder.exists())
    is_writable = os.access(there, os.W_OK) and there.is_dir() is (there != file)
    return [] if is_writable else [f"ledger names {path!r}, which is no file that can be written; name another"]


def check_gateway(settings: Mapping[str, Any]) -> list[str]:
    """The gateway, which starts last, can use its settings and its keys; asked of itself, so that there is one rule."""
    with tempfile.TemporaryDirectory(prefix="k3-sglang-") as folder:
        file = Path(folder) / "gateway.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        command = [sys.executable, "-m", "agent_runtime.gateway", "--settings", str(file), "--check"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GATEWAY_CHECK_S)
        except subprocess.TimeoutExpired:
            return [f"the gateway did not say within {GATEWAY_CHECK_S} s whether it can use its settings; try again"]
        if done.returncode == 0:
            return []
        said = done.stderr.strip() or f"it ended with {done.returncode} and said nothing"
        return [f"the gateway refuses: {said.removeprefix('gateway: ').replace(f'settings file {file}: ', '')}"]


def check_sglang() -> list[str]:
    """SGLang is installed and is the version the plugin was checked on."""
    remedy = f"install the extra `serve` of this package with Python 3.11 (it pins sglang=={SGLANG_VERSION})"
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return [f"sglang is not installed; {remedy}"]
    if version != SGLANG_VERSION:
        return [f"sglang is {version}; this plugin works with {SGLANG_VERSION} only: {remedy}"]
    return []


def check_entry_points(find: Callable[..., Iterable[importlib.metadata.EntryPoint]]) -> list[str]:
    """Both entry points are registered and resolve to this very copy of the package.

    Args:
        find: ``importlib.metadata.entry_points``, or one that answers ``group=`` and ``name=`` like it.
    """
    found: list[str] = []
    for group, name in ENTRY_POINTS.items():
        ours = list(find(group=group, name=name))
        if not ours:
            found.append(f"entry point {name!r} of group {group!r} is not installed; {REINSTALL}")
        found.extend(problem for entry in ours for problem in check_target(entry.value))
    return found


def check_target(value: str) -> list[str]:
    """``module:function`` exists inside this package (looked up without importing torch)."""
    module, _, function = value.partition(":")
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        return [f"entry point {value!r} names a module that does not exist; {REINSTALL}"]
    source = Path(spec.origin).resolve()
    package = Path(str(k3_sglang.__file__)).resolve().parent
    if not source.is_relative_to(package):
        return [f"entry point {value!r} resolves to {source}, outside the running package {package}; {REINSTALL}"]
    tree = ast.parse(source.read_text(encoding="utf-8"))
    if not any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body):
        return [f"entry point {value!r}: {source} defines no function {function!r}; {REINSTALL}"]
    return []


def check_environment(environment: Mapping[str, str], device: str) -> list[str]:
    """No SGLang variable keeps our plugin or our CPU platform from being used."""
    found: list[str] = []
    allowed = _names(environment.get("SGLANG_PLUGINS", ""))
    missing = sorted(set(ENTRY_POINTS.values()) - allowed)
    if allowed and missing:
        found.append(
            f"SGLANG_PLUGINS is {environment['SGLANG_PLUGINS']!r} and leaves out {missing}; add them or unset it"
        )
    platform = environment.get("SGLANG_PLATFORM", "")
    if platform and (device != "cpu" or platform != ENTRY_POINTS["sglang.srt.platforms"]):
        found.append(f"SGLANG_PLATFORM is {platform!r}, which excludes this plugin on device {device}; unset it")
    if device == "cpu" and environment.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        found.append("SGLANG_USE_CPU_ENGINE is 1: that engine needs a CPU build of sgl-kernel; unset it")
    return found


def check_checkpoint(directory: Path, *, weights: bool, images: bool) -> list[str]:
    """The vocabulary is there, and the weight files hold the tensors that config.json describes.

    Only headers are read. What is wrong would show after minutes or an hour of loading otherwise.

    Args:
        weights: whether the engine reads safetensors files (not with a ``load-format`` such as ``dummy``).
        images: whether it loads the image tower.
    """
    if not (directory / VOCABULARY_FILE).is_file():
        return [f"{directory} lacks {VOCABULARY_FILE}; the download is not complete"]
    return checkpoint_problems(directory, images=images) if weights else []


def check_port(setting: str, host: str, port: int) -> list[str]:
    """The port can be bound now."""
    try:
        bind_once(host, port)
    except OSError as error:
        return [f"{setting} {port} on {host} cannot be used ({error.strerror}); choose another, or 0 for a free one"]
    return []


def _names(value: str) -> set[str]:
    parts: Iterable[str] = (part.strip() for part in value.split(","))
    return {part for part in parts if part}
