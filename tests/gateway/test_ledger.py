"""A gateway with a ledger: what it keeps reproduces every byte that went in and out, and a restart loses nothing."""

import copy
import json
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_runtime.__main__ import main as agent_command
from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.guard.again import made_again
from agent_runtime.ledger.__main__ import main
from agent_runtime.ledger.reading import LedgerReader
from agent_runtime.ledger.replay import replayed_steps
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import chat, chat_with_tool, continued, tool_results, user
from tests.gateway.serving import serving
from tests.gateway.stub_engine import StubEngine, cut, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
ODD_CALL = ("get_weather", (("city", "string", "Oslo"), ("days", "number", "3.0")))


@pytest.fixture
def settings(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """With a ledger."""
    return {**settings, "ledger": str(tmp_path / "ledger.db")}


@asynccontextmanager
async def started(
    settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A gateway process, as far as the ledger can tell."""
    app = create_app(GatewaySettings(**settings), SGLangEngine(engine_url), tokenizer)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        yield client


async def post(client: httpx.AsyncClient, body: dict[str, Any], **dump: Any) -> tuple[dict[str, Any], bytes]:
    """The answer, and the body as it went over the wire."""
    raw = json.dumps(body, **dump).encode()
    response = await client.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    return response.json(), raw


async def test_every_byte_can_be_reproduced_without_a_model(
    settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str, stub: StubEngine, writer: TurnWriter
) -> None:
    sent: list[bytes] = []
    async with started(settings, tokenizer, engine_url) as client:
        body = chat_with_tool(temperature=0.3, logit_bias={"65": -1.5})
        for number, dump in enumerate(({}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False})):
            ids = writer.turn(f"thoughts {number}", "Ich schaue: ü", (ODD_CALL,))
            stub.plan = lambda _, ids=ids: says(ids, end_of_msg=END_OF_MSG)
            answer, raw = await post(client, body, **dump)
            sent.append(raw)
            body = continued(body, answer, *tool_results(answer, "rain é"))
            if number == 1:  # a client that loses all thinking from here on
                body = copy.deepcopy(body)
                body["messages"] = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in body["messages"]]
        _, raw = await post(client, chat("other session", n=2))
        sent.append(raw)
    with LedgerReader(Path(settings["ledger"])) as reader:
        steps = list(replayed_steps(reader))
        assert [step.body for step in steps] == sent
        assert sorted(one for step in steps for one in step.engine) == sorted(stub.bodies)
        assert reader.check() == []
        outcomes = list(made_again(reader, tokenizer))
    assert [outcome.same for outcome in outcomes] == [True] * 5
    assert [outcome.verdict for outcome in outcomes] == ["new", "exact", "repaired", "repaired", "new"]
    assert len({outcome.session for outcome in outcomes}) == 2


async def test_a_restarted_gateway_knows_every_turn(
    settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str, stub: StubEngine, writer: TurnWriter
) -> None:
    """Case 7 of the survey: a session is saved, the process ends, the session goes on without its thinking."""
    outputs = [writer.turn(f"thoughts {number}", f"answer {number}") for number in range(2)]
    body = chat()
    for ids in outputs:
        stub.plan = lambda _, ids=ids: says(ids, end_of_msg=END_OF_MSG)
        async with started(settings, tokenizer, engine_url) as client:
            answer, _ = await post(client, body)
        body = continued(body, answer, user("go on"))
    before = stub.requests[-1]["input_ids"]
    for message in body["messages"]:
        message.pop("reasoning_content", None)
    async with started(settings, tokenizer, engine_url) as client:
        answer, _ = await post(client, body)
    assert answer["k3"]["replay"]["verdict"] == "repaired"
    assert stub.requests[-1]["input_ids"][: len(before) + len(outputs[1])] == before + outputs[1]


async def test_what_the_gateway_answered_is_on_record(
    settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str, stub: StubEngine, writer: TurnWriter
) -> None:
    ids = writer.turn("R", "whole", (ODD_CALL,))
    async with started(settings, tokenizer, engine_url) as client:
        stub.plan = lambda _: cut(ids[:-8])
        answer, _ = await post(client, {**chat_with_tool(), "prompt_cache_key": "mine"})
    with LedgerReader(Path(settings["ledger"])) as reader:
        (session,) = reader.sessions()
        assert (session.name, session.steps, session.turns) == ("prompt_cache_key:mine", 1, 1)
        (record,) = reader.turns(session.id)
    assert record.ids == tuple(ids[:-8])
    assert record.turn.ids is None
    assert record.turn.message.reasoning == "R"
    assert record.facts["finish"] == "length"
    assert record.facts["usage"] == answer["usage"]


async def test_without_the_setting_nothing_is_written(
    settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str, tmp_path: Path
) -> None:
    before = set(tmp_path.iterdir())
    async with started({**settings, "ledger": None}, tokenizer, engine_url) as client:
        await post(client, chat())
    assert set(tmp_path.iterdir()) == before


async def test_a_ledger_that_cannot_be_written_to_any_more_stops_no_request(
    settings: dict[str, Any],
    tokenizer: K3Tokenizer,
    engine_url: str,
    stub: StubEngine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with started(settings, tokenizer, engine_url) as client:
        answer, _ = await post(client, chat())
        with sqlite3.connect(settings["ledger"]) as db:
            db.execute("DROP TABLE turns")
        db.close()
        body = continued(chat(), answer, user("go on"))
        for _ in range(2):
            again, _ = await post(client, body)
            assert again["k3"]["replay"]["verdict"] == "exact"
    failures = [record for record in caplog.records if "cannot be written" in record.message]
    assert len(failures) == 1


def test_the_command_lists_shows_checks_and_forgets(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    path = str(tmp_path / "none.db")
    assert main(["sessions", path]) == 2
    assert b"cannot read ledger" in capsysbinary.readouterr().err


async def test_the_command_shows_what_is_there(
    settings: dict[str, Any],
    tokenizer: K3Tokenizer,
    engine_url: str,
    stub: StubEngine,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    path = settings["ledger"]
    async with started(settings, tokenizer, engine_url) as client:
        await post(client, {**chat(), "k3": {"cache": {"session": "mine"}}})
    assert main(["sessions", path]) == 0
    assert b"mine" in capsysbinary.readouterr().out
    with LedgerReader(Path(path)) as reader:
        session = str(reader.sessions()[0].id)
    assert main(["show", path, session]) == 0
    assert b"new" in capsysbinary.readouterr().out
    assert main(["replay", path]) == 0
    assert capsysbinary.readouterr().out == stub.bodies[0] + b"\n"
    assert main(["check", path]) == 0
    assert capsysbinary.readouterr().out == b"1 steps, 0 problems\n"
    assert main(["forget", path, session]) == 0
    capsysbinary.readouterr()
    assert main(["show", path, session]) == 0


async def test_the_agents_commands_read_a_ledger_too(
    settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with started(settings, tokenizer, engine_url) as client:
        await post(client, chat("Hello", prompt_cache_key="mine"))
    assert agent_command(["sessions", "--ledger", settings["ledger"]]) == 0
    assert capsys.readouterr().out.splitlines()[1].split("\t")[1:3] == ["1", "1"]
    assert agent_command(["replay", settings["ledger"]]) == 0
    assert capsys.readouterr().out == "1 steps, 0 problems\n"
    assert agent_command(["replay", settings["ledger"], "--request", "1"]) == 2
    assert "--request is for run logs" in capsys.readouterr().out
