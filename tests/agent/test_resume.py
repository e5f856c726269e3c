"""A session goes on from its log wherever its process ended: kill -9 at random moments, and a log cut at any byte."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from agent_runtime.compression.trigger import CompressionSettings
from agent_runtime.engine.openai_chat import ChatClient
from agent_runtime.events import RunStatus
from agent_runtime.limits import Limits
from agent_runtime.loop import Agent, AgentOptions
from agent_runtime.replay import replay
from agent_runtime.resume import recover
from agent_runtime.runstore import FileRunStore, MemoryRunStore, RunLogError, read_run_log
from agent_runtime.session import SyncAgent
from agent_runtime.tools.registry import ToolRegistry, tool
from tests.agent.crash_session import STEPS, check_log, go_on, registry
from tests.agent.scripted_endpoint import says, serve
from tests.agent.scripted_model import ScriptedModel, turn

KILLS = 100
CUTS = 300


async def whole_log(folder: Path) -> bytes:
    """The log of the session that nothing interrupted."""
    path = folder / "whole.jsonl"
    with FileRunStore(path) as store:
        result = await go_on(store, folder / "whole.txt")
    assert result.status is RunStatus.COMPLETED and len(result.steps) == STEPS + 1
    assert recover(read_run_log(path)).window.number == 1, "the session is compressed on its way"
    return path.read_bytes()


async def test_the_session_that_nothing_interrupts_replays_in_the_same_bytes(tmp_path: Path) -> None:
    await whole_log(tmp_path)
    entries = read_run_log(tmp_path / "whole.jsonl")
    check_log(entries)
    purposes = [request.purpose for request in replay(entries)]
    assert purposes.count("summary") == 1 and purposes.count("step") == STEPS + 2, "one step failed and was asked again"


async def test_a_log_cut_at_any_byte_goes_on_to_the_same_end(tmp_path: Path) -> None:
    """Every cut is a state that a killed process can leave: the file only grows, in order."""
    whole = await whole_log(tmp_path)
    first = whole.index(b"\n") + 1
    wanted = json.dumps([m for m in recover(read_run_log(tmp_path / "whole.jsonl")).conversation.wire()])
    chance = random.Random(7)
    log, effects, same = tmp_path / "cut.jsonl", tmp_path / "effects.txt", 0
    for _ in range(CUTS):
        log.write_bytes(whole[: chance.randrange(first, len(whole) + 1)])
        with FileRunStore(log) as store:
            before = recover(store.entries())
            if not before.unfinished and before.status == "completed":
                continue
            result = await go_on(store, effects)
        assert result.status is RunStatus.COMPLETED and len(result.steps) == STEPS + 1
        entries = read_run_log(log)
        check_log(entries)
        same += json.dumps(recover(entries).conversation.wire()) == wanted
    assert same > CUTS // 2, "only a cut within a call that changes something shows in the history"


def test_a_process_killed_at_random_moments_is_gone_on_with(tmp_path: Path, repository: Path) -> None:
    """Also in the middle of tools, retries and compressions; nothing that changes something runs twice."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.agent.crash_session", str(tmp_path), str(KILLS), "11"],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] >= KILLS and counts["interrupted"] > 0, "some were killed in the middle of a tool"


async def test_what_was_used_of_the_limits_counts_after_a_resume(tmp_path: Path) -> None:
    entries = [json.loads(line) for line in (await whole_log(tmp_path)).splitlines()]
    cut = next(n for n, entry in enumerate(entries) if entry["kind"] == "step" and entry["record"]["step"] == 4)
    store = MemoryRunStore(entries[: cut + 1])
    agent = Agent.resume(ScriptedModel([turn("x")]), registry(tmp_path / "e"), store, limits=Limits(max_steps=4))
    result = await agent.proceed()
    assert result.status is RunStatus.MAX_STEPS and len(result.steps) == 4
    assert [run.call.name for run in result.steps[0].tools] == ["read", "write", "read"]
    assert result.steps[0].tools[1].result.model == "wrote 0" and result.usage.prompt_tokens > 0


async def test_the_loop_breaker_counts_over_a_resume() -> None:
    @tool
    async def look() -> str:
        """Looks."""
        return "nothing new"

    store, tools = MemoryRunStore(), ToolRegistry([look])
    first = Agent(ScriptedModel([turn("", ("look", "{}"))]), tools, store=store, limits=Limits(max_steps=4))
    assert (await first.run("go")).status is RunStatus.MAX_STEPS
    entries = [entry for entry in store.entries() if entry["kind"] != "end"]
    again = Agent.resume(ScriptedModel([turn("", ("look", "{}"))]), tools, MemoryRunStore(entries))
    result = await again.proceed()
    assert result.status is RunStatus.REPEATED_CALLS and len(result.steps) == 6, "not six more"


async def test_a_new_run_can_begin_in_place_of_the_unfinished_one() -> None:
    @tool
    async def look() -> str:
        """Looks."""
        return "x"

    store, tools = MemoryRunStore(), ToolRegistry([look])
    await Agent(ScriptedModel([turn("", ("look", "{}")), turn("done")]), tools, store=store).run("go")
    cut = next(n for n, entry in enumerate(store.entries()) if entry["kind"] == "started")
    model = ScriptedModel([turn("ok")])
    agent = Agent.resume(model, tools, MemoryRunStore(store.entries()[:cut]))
    assert agent.unfinished
    assert (await agent.run("something else")).text == "ok" and not agent.unfinished
    assert str(model.seen[0].messages[-2].content).startswith("Interrupted")
    with pytest.raises(RuntimeError, match="no unfinished run"):
        await agent.proceed()


async def test_a_session_is_not_resumed_with_other_tools() -> None:
    @tool
    async def look() -> str:
        """Looks."""
        return "x"

    store = MemoryRunStore()
    await Agent(ScriptedModel([turn("done")]), ToolRegistry([look]), store=store).run("go")
    other = tool(description="Looks elsewhere.")(look.function)
    with pytest.raises(RunLogError, match="tool 'look' of the session is declared differently"):
        Agent.resume(ScriptedModel([turn("x")]), ToolRegistry([other]), store)
    with pytest.raises(RunLogError, match="tool 'look' of the session is not registered"):
        Agent.resume(ScriptedModel([turn("x")]), ToolRegistry(), store)
    with pytest.raises(ValueError, match="not empty; go on with it by Agent.resume"):
        Agent(ScriptedModel([turn("x")]), ToolRegistry(), store=store)


async def test_case07_reasoning_is_byte_equal_after_save_and_resume(tmp_path: Path) -> None:
    """siyuan#18469, hermes-agent#13864: thinking was lost on the way to disk and back."""
    path, thought = tmp_path / "s.jsonl", 'tabs\t "quotes" \\ 🙂\u2028  trailing \n\n'
    with FileRunStore(path) as store:
        await Agent(ScriptedModel([turn("a", reasoning=thought)]), ToolRegistry(), "s", store=store).run("one")
    model = ScriptedModel([turn("b")])
    with FileRunStore(path) as store:
        await Agent.resume(model, ToolRegistry(), store).run("two")
    assert model.seen[0].messages[2].reasoning == thought


async def test_compression_settings_and_window_survive_a_resume() -> None:
    store = MemoryRunStore()
    options = AgentOptions(CompressionSettings(trigger_tokens=10, user_tokens=8, user_head_tokens=4))
    agent = Agent(ScriptedModel([turn("x"), turn("SUM"), turn("y")]), ToolRegistry(), store=store, options=options)
    await agent.run("0123456789" * 4)
    await agent.compress()
    again = Agent.resume(ScriptedModel([turn("z")]), ToolRegistry(), store, options=options)
    assert again.history.window == agent.history.window
    assert again.history.window.number == 1 and again.history.window.elided_tokens == 32
    assert again.conversation.messages == agent.conversation.messages


async def test_calls_that_had_started_count_for_the_budget_of_calls_after_a_resume() -> None:
    @tool
    async def look(n: int) -> str:
        """Looks.

        Args:
            n: Where.
        """
        return str(n)

    store, tools = MemoryRunStore(), ToolRegistry([look])
    script = [turn("", *(("look", f'{{"n": {n}}}') for n in range(3))), turn("done")]
    await Agent(ScriptedModel(list(script)), tools, store=store).run("go")
    ends = [number for number, entry in enumerate(store.entries()) if entry["kind"] == "result"]
    cut = MemoryRunStore(store.entries()[: ends[0] + 1])
    agent = Agent.resume(ScriptedModel([turn("done")]), tools, cut, limits=Limits(tool_calls=3))
    result = await agent.proceed()
    assert [run.result.model for run in result.steps[0].tools] == ["0", "1", "2"]
    assert result.status is RunStatus.TOOL_BUDGET


def test_the_sync_wrapper_goes_on_with_a_run_too() -> None:
    store = MemoryRunStore()
    with serve(says("done")) as endpoint:
        client = ChatClient(endpoint.base_url)
        with SyncAgent(Agent(client, ToolRegistry(), store=store), client) as agent:
            agent.run("go")
        entries = [entry for entry in store.entries() if entry["kind"] in ("open", "run")]
        client = ChatClient(endpoint.base_url)
        with SyncAgent(Agent.resume(client, ToolRegistry(), MemoryRunStore(entries)), client) as agent:
            assert agent.proceed().text == "done"
    assert endpoint.requests[0]["messages"] == endpoint.requests[1]["messages"]
