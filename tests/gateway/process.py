"""The gateway as a process of its own: its settings file, its start, its URL."""

import asyncio
import base64
import json
import re
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.bodies import MODEL
from tests.gateway.vocabulary import SPECIALS

COMMAND = [sys.executable, "-m", "agent_runtime.gateway"]


def vocabulary_files(folder: Path) -> None:
    """Write the vocabulary of one token per byte."""
    lines = [f"{base64.b64encode(bytes((value,))).decode()} {value}" for value in range(256)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    specials = {str(256 + index): {"content": text} for index, text in enumerate(SPECIALS)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": specials}))


def write(folder: Path, changes: dict[str, Any]) -> Path:
    """The settings file with some keys changed."""
    values = {
        "model": MODEL,
        "tokenizer_dir": str(folder),
        "context_len": 10_000,
        "port": 0,
        "engine_url": "http://127.0.0.1:9",
        "shutdown_grace_s": 1,
    }
    path = folder / "gateway.json"
    path.write_text(json.dumps(values | changes))
    return path


@asynccontextmanager
async def running(path: Path) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str], None]:
    """The process once it listens, and its URL; killed if the test leaves it alive."""
    process = await asyncio.create_subprocess_exec(*COMMAND, "--settings", str(path), stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        seen: list[str] = []
        async for line in process.stderr:
            seen.append(line.decode())
            if found := re.search(r"running on (http://\S+)", seen[-1]):
                yield process, found[1]
                break
        else:
            pytest.fail(f"the gateway ended before it listened: {''.join(seen)}")
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
