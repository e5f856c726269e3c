"""`python -m agent_runtime.gateway` as a process: settings, start, and a stop that leaves nothing running."""

import asyncio
import base64
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_runtime.errors import SettingsError
from agent_runtime.gateway.settings import GatewaySettings
from tests.gateway.bodies import MODEL, chat, streamed
from tests.gateway.stub_engine import Script, StubEngine
from tests.gateway.vocabulary import SPECIALS, TurnWriter

COMMAND = [sys.executable, "-m", "agent_runtime.gateway"]


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    """A settings file with a vocabulary beside it, for port 0 and an engine nobody runs."""
    lines = [f"{base64.b64encode(bytes((value,))).decode()} {value}" for value in range(256)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    specials = {str(256 + index): {"content": text} for index, text in enumerate(SPECIALS)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": specials}))
    return write(tmp_path, {})


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_with_success(settings_file: Path, number: signal.Signals) -> None:
    async with running(settings_file) as (process, url):
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == MODEL
        process.send_signal(number)
        assert await process.wait() == 0


async def test_a_stop_aborts_what_still_runs_after_the_grace(
    settings_file: Path, engine_url: str, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda body: Script([writer.text("thinking")], None)
    path = write(settings_file.parent, {"engine_url": engine_url})
    async with running(path) as (process, url), httpx.AsyncClient(base_url=url, trust_env=False) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("POST", "/v1/chat/completions", json=streamed(chat())) as response:
                async for line in response.aiter_lines():
                    if "reasoning_content" in line:
                        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert stub.aborts == [stub.requests[0]["rid"]]


def test_help_lists_the_keys_of_the_settings_file() -> None:
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert all(key in text for key in GatewaySettings.model_fields)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modle": "x"}, ["modle='x'", "Keys: model,"]),
        ({"context_len": 0}, ["context_len=0", "greater than or equal to 1"]),
        ({"port": 70_000}, ["port=70000"]),
        ({"tokenizer_dir": "nowhere"}, ["tiktoken.model does not exist"]),
    ],
)
def test_wrong_settings_end_the_process_with_one_line(
    settings_file: Path, changes: dict[str, Any], words: list[str]
) -> None:
    path = write(settings_file.parent, changes)
    done = subprocess.run([*COMMAND, "--settings", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_a_settings_file_must_be_there_and_be_json(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        GatewaySettings.from_file(tmp_path / "missing.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(SettingsError, match="is not JSON"):
        GatewaySettings.from_file(broken)


def test_the_gateway_needs_neither_torch_nor_sglang() -> None:
    code = "import sys, agent_runtime.gateway.__main__; print({'torch', 'sglang'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
