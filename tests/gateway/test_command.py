"""`python -m agent_runtime.gateway` as a process: settings, start, and a stop that leaves nothing running."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_runtime.errors import SettingsError
from agent_runtime.gateway.settings import GatewaySettings
from tests.gateway.bodies import MODEL, chat, streamed
from tests.gateway.process import COMMAND, running, write
from tests.gateway.stub_engine import Script, StubEngine
from tests.gateway.vocabulary import TurnWriter


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
