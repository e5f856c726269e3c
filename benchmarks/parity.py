"""Does the engine compute what the reference computes? Every mode, in float32 and bfloat16, on golden data, as tables.

    python benchmarks/parity.py --golden DIR                     # everything: six servers, one after the other
    python benchmarks/parity.py --golden DIR --dtypes float32 --chunks 4096 --modes prefill components

DIR holds ``checkpoint/`` and ``expected/``. The chunk size is fixed when SGLang starts, so each pair of dtype and chunk
size is a server of its own, started and stopped here. The exit code is 1 when a line misses its limit.

- prefill: cold, every position of every prompt, over the whole vocabulary.
- decode: token by token.
- hits: a prefix first, then a longer prompt; everything after the hit.
- components: values inside the model, state slots and KV rows of the running engine, and image features (float32).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table

from k3_sglang.parity import modes
from k3_sglang.parity.compare import LIMITS
from k3_sglang.parity.components import (
    Component,
    compare_components,
    engine_values,
    golden_values,
    read_passes,
    vision_component,
)
from k3_sglang.parity.engine import ScoredEngine
from k3_sglang.parity.golden import Golden
from k3_sglang.parity.modes import Row

MODES = ("prefill", "decode", "hits", "components")
WHOLE = 4096
"""Chunk size that cuts no prompt: the golden checkpoint's context is as long."""

COMPONENT_PROMPT = "len64"
STOP_TIMEOUT_S = 60
REQUEST_TIMEOUT_S = 600

progress = Console(stderr=True)


@contextlib.contextmanager
def serving(golden: Golden, dtype: str, chunk_tokens: int, dump_dir: Path) -> Iterator[ScoredEngine]:
    """The launcher with the golden checkpoint on free ports, always stopped."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "k3_sglang.launch", "--model", str(golden.checkpoint), "--device", "cpu"]
    command += ["--dtype", dtype, "--chunked-prefill-tokens", str(chunk_tokens), "--constrain", "off"]
    command += ["--kv-tokens", "8192", "--state-slots", "48", "--max-running-requests", "4", "--page-size", "1"]
    command += ["--port", "0", "--engine-port", str(port)]
    environment = {**os.environ, "K3_SGLANG_DUMP_DIR": str(dump_dir)}
    # A session of its own: Ctrl-C reaches this program only, which then stops the launcher once.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        assert process.stdout is not None
        if not any(line.startswith("ready") for line in process.stdout):
            raise SystemExit("the server ended before it was ready; its messages are above")
        address = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=address, timeout=REQUEST_TIMEOUT_S, trust_env=False) as http:
            yield ScoredEngine(http, golden.config.text.vocab_size)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_TIMEOUT_S)


def compared_rows(
    engine: ScoredEngine, golden: Golden, dtype: str, chunk_tokens: int, wanted: Sequence[str]
) -> Iterator[Row]:
    """Lines of one server."""
    label = "one piece" if chunk_tokens >= WHOLE else f"chunks of {chunk_tokens}"
    prompts = (*golden.prompts, golden.long_prompt)
    if "prefill" in wanted:
        longer = [prompt for prompt in prompts if len(prompt.ids) > chunk_tokens]
        yield from modes.prefill(engine, golden, dtype, label, prompts if chunk_tokens >= WHOLE else longer)
    if "decode" in wanted and chunk_tokens >= WHOLE:
        yield from modes.decode(engine, golden, dtype)
    if "hits" in wanted:
        for prompt in prompts[-2:]:
            if chunk_tokens >= WHOLE:
                prefixes = modes.prefixes_on_the_grid(prompt) + modes.prefixes_off_the_grid(prompt)
            else:
                prefixes = modes.prefixes_behind_a_chunk(prompt, chunk_tokens)
            for prefix_len, hit_len in prefixes:
                row = modes.after_hit(engine, golden, dtype, prompt, prefix_len, hit_len)
                yield replace(row, mode=f"{label}, {row.mode}")


def compared_components(engine: ScoredEngine, golden: Golden, dump_dir: Path) -> list[Component]:
    """Values inside the model and in the pools after one prompt, from the engine's own passes."""
    engine.flush()
    dump_dir.mkdir()
    engine.run(golden.prompt(COMPONENT_PROMPT).ids)
    (recorded,) = read_passes(dump_dir)
    return [*compare_components(engine_values(recorded), golden_values(golden)), vision_component(golden)]


def show_rows(rows: Sequence[Row]) -> None:
    """Print the table of modes."""
    table = Table(title="log-probabilities over the whole vocabulary, engine against reference")
    for column in ("dtype", "mode", "prompt", "cached", "positions", "same top-1", "max |d|", "mean |d|", "limit", ""):
        table.add_column(column, justify="left" if column in ("dtype", "mode", "prompt") else "right")
    for row in rows:
        found = row.agreement
        figures = (f"{found.top1:.1%}", f"{found.max_abs:.1e}", f"{found.mean_abs:.1e}")
        limits = LIMITS[row.dtype]
        limit = f"{limits.max_abs:g}" if row.dtype == "float32" else f"mean {limits.mean_abs:g}, max {limits.max_abs:g}"
        verdict = "ok" if row.passed else "MISSED"
        cells = (row.dtype, row.mode, row.prompt, row.cached_tokens, found.positions, *figures, limit, verdict)
        table.add_row(*map(str, cells))
    Console().print(table)


def show_components(components: Sequence[Component]) -> None:
    """Print the table of components."""
    table = Table(title=f"values inside the running engine after the prompt {COMPONENT_PROMPT}, float32")
    for column in ("component", "tensors", "max |d|", "error", "limit", ""):
        table.add_column(column, justify="left" if column == "component" else "right")
    for row in components:
        figures = (f"{row.max_abs:.1e}", f"{row.error:.1e}", f"{row.limit:g}")
        table.add_row(row.name, str(row.tensors), *figures, "ok" if row.passed else "MISSED")
    Console().print(table)


def as_json(rows: Sequence[Row], components: Sequence[Component]) -> str:
    """Both tables as JSON."""
    lines: list[dict[str, Any]] = [{**asdict(row), "passed": row.passed} for row in rows]
    parts: list[dict[str, Any]] = [{**asdict(part), "passed": part.passed} for part in components]
    return json.dumps({"modes": lines, "components": parts}, indent=2) + "\n"


def compare(arguments: argparse.Namespace) -> tuple[list[Row], list[Component]]:
    """Start the servers one after the other and compare."""
    golden = Golden(arguments.golden)
    rows: list[Row] = []
    components: list[Component] = []
    for dtype in arguments.dtypes:
        for chunk_tokens in arguments.chunks:
            if chunk_tokens < WHOLE and not {"prefill", "hits"} & set(arguments.modes):
                continue  # the other modes need no prompt that is cut
            progress.print(f"parity: {dtype}, chunks of {chunk_tokens} tokens: starting a server")
            with tempfile.TemporaryDirectory() as scratch:
                dump_dir = Path(scratch) / "passes"
                with serving(golden, dtype, chunk_tokens, dump_dir) as engine:
                    for row in compared_rows(engine, golden, dtype, chunk_tokens, arguments.modes):
                        rows.append(row)
                        progress.print(f"parity: {dtype}, {row.mode}, {row.prompt}: max {row.agreement.max_abs:.1e}")
                    if "components" in arguments.modes and dtype == "float32" and chunk_tokens >= WHOLE:
                        components = compared_components(engine, golden, dump_dir)
            if arguments.json:
                arguments.json.write_text(as_json(rows, components), encoding="utf-8")
    return rows, components


def interrupt(*_: object) -> None:
    """Whatever asks this program to end, the server is stopped first."""
    raise KeyboardInterrupt


def main() -> int:
    """Parse arguments, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golden", type=Path, required=True, help="folder that holds checkpoint/ and expected/")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(LIMITS), default=list(LIMITS), help="model types")
    parser.add_argument("--chunks", nargs="+", type=int, default=[WHOLE, 64, 100], help="tokens of a prefill step")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="what to compare")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    torch.set_num_threads(1)  # the reference model's tensors are small, and the engine wants the cores
    try:
        rows, components = compare(arguments)
    except KeyboardInterrupt:
        progress.print("parity: interrupted; the server was stopped")
        return 130
    if rows:
        show_rows(rows)
    if components:
        show_components(components)
    return 0 if all(row.passed for row in rows) and all(part.passed for part in components) else 1


if __name__ == "__main__":
    sys.exit(main())
