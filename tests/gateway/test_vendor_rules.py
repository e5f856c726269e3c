"""What Moonshot's vendor verifier asks of a server's front end, over HTTP: the rules that need no trained weights."""

import json
from typing import Any

import pytest

from tests.gateway.bodies import WEATHER_TOOL, chat, chat_with_tool, continued, user
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import StubEngine, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258


def named(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    """A tool with these properties, all required."""
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}


LATER_TOOL = named("look_up", {"城市": {"type": "string"}})


async def prompt_of(gateway: Running, stub: StubEngine, body: dict[str, Any]) -> list[int]:
    """The ids that the engine is asked."""
    stub.requests.clear()
    await gateway.ask(body)
    return stub.requests[0]["input_ids"]


async def refused(gateway: Running, body: dict[str, Any]) -> dict[str, Any]:
    """The error that answers a request."""
    return (await gateway.ask(body, 400))["error"]


class TestSamplingIsFixed:
    """With the setting that makes the server as strict as Moonshot's."""

    @pytest.fixture
    def settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {**settings, "fixed_sampling": True}

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("temperature", 0.6),
            ("temperature", 0),
            ("top_p", 0.9),
            ("n", 2),
            ("presence_penalty", 0.5),
            ("frequency_penalty", -1),
            ("repetition_penalty", 1.2),
            ("top_k", 40),
            ("min_p", 0.1),
            ("logit_bias", {"65": 1}),
        ],
    )
    async def test_another_value_is_refused_by_name(self, gateway: Running, name: str, value: Any) -> None:
        error = await refused(gateway, {**chat(), name: value})
        assert (error["param"], error["code"]) == (name, "unsupported_value")

    async def test_the_models_own_values_and_none_are_accepted(self, gateway: Running, stub: StubEngine) -> None:
        fixed = {"temperature": 1.0, "top_p": 0.95, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0}
        await gateway.ask(chat())
        await gateway.ask(chat(**fixed))
        without, with_them = (request["sampling_params"] for request in stub.requests)
        assert (without["temperature"], without["top_p"]) == (with_them["temperature"], with_them["top_p"]) == (1, 0.95)

    async def test_it_holds_in_every_protocol(self, gateway: Running) -> None:
        ways: dict[str, dict[str, Any]] = {
            "responses": {"input": "Hi"},
            "messages": {"messages": [user("Hi")], "max_tokens": 5},
            "completions": {"prompt": "Hi"},
        }
        for path, body in ways.items():
            answer = await gateway.client.post(f"/v1/{path}", json={"model": "kimi-k3", "temperature": 0.5, **body})
            assert answer.status_code == 400 and "temperature" in answer.text, path


class TestDynamicTools:
    """A system message without content declares tools where it stands."""

    def body(self, **fields: Any) -> dict[str, Any]:
        later = {"role": "system", "tools": [LATER_TOOL]}
        return {**chat_with_tool(), "messages": [user("Hello"), later, user("Look it up.")], **fields}

    async def test_their_calls_are_delivered_with_names_in_any_script(
        self, gateway: Running, stub: StubEngine, writer: TurnWriter
    ) -> None:
        ids = writer.turn("T", "", (("look_up", (("城市", "string", "奥斯陆"),)),))
        stub.plan = lambda _: says(ids, end_of_msg=END_OF_MSG)
        (call,) = (await gateway.ask(self.body()))["choices"][0]["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look_up", {"城市": "奥斯陆"})

    async def test_they_can_be_required_and_named(self, gateway: Running, stub: StubEngine) -> None:
        for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
            stub.requests.clear()
            await gateway.ask(self.body(tool_choice=choice))
            assert "look_up" in str(stub.requests[0]["sampling_params"]["structural_tag"])

    @pytest.mark.parametrize("role", ["user", "assistant"])
    async def test_other_roles_cannot_declare_them(self, gateway: Running, role: str) -> None:
        messages = [user("Hello"), {"role": role, "content": "x", "tools": [LATER_TOOL]}, user("Go on.")]
        error = await refused(gateway, self.body(messages=messages))
        assert (error["param"], error["code"]) == ("messages[1].tools", "tools_on_wrong_role")

    async def test_content_beside_them_and_a_name_twice_are_refused(self, gateway: Running) -> None:
        beside = {"role": "system", "content": "x", "tools": [LATER_TOOL]}
        twice = {"role": "system", "tools": [WEATHER_TOOL]}
        for message, code in ((beside, "content_beside_tools"), (twice, "duplicate_tool")):
            assert (await refused(gateway, self.body(messages=[user("Hello"), message])))["code"] == code


class TestEffort:
    """Three tiers, one of them the default; the two places to say it."""

    async def test_max_is_the_default_and_every_tier_is_another_prompt(
        self, gateway: Running, stub: StubEngine
    ) -> None:
        prompts = {
            tier: tuple(await prompt_of(gateway, stub, chat(reasoning_effort=tier))) for tier in ("low", "high", "max")
        }
        assert len(set(prompts.values())) == 3
        assert tuple(await prompt_of(gateway, stub, chat())) == prompts["max"]

    async def test_thinkings_effort_wins_over_reasoning_effort(self, gateway: Running, stub: StubEngine) -> None:
        low = await prompt_of(gateway, stub, chat(reasoning_effort="low"))
        both = chat(reasoning_effort="max", thinking={"type": "enabled", "effort": "low"})
        assert await prompt_of(gateway, stub, both) == low

    async def test_an_unknown_word_is_refused(self, gateway: Running) -> None:
        assert (await refused(gateway, chat(reasoning_effort="turbo")))["param"] == "reasoning_effort"


class TestToolChoiceAndResponseFormat:
    """What stands behind the history for one turn, and what it holds the model to."""

    async def test_required_and_formats_are_constraints_and_auto_is_none(
        self, gateway: Running, stub: StubEngine
    ) -> None:
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        strict = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
        for fields, constrained in (
            ({"tool_choice": "required"}, True),
            ({"tool_choice": "auto"}, False),
            ({"response_format": {"type": "json_object"}}, True),
            ({"response_format": strict}, True),
            ({"response_format": {"type": "text"}}, False),
        ):
            stub.requests.clear()
            await gateway.ask({**chat_with_tool(), **fields})
            assert ("structural_tag" in stub.requests[0]["sampling_params"]) is constrained, fields

    async def test_no_call_is_delivered_with_none(self, gateway: Running, stub: StubEngine, writer: TurnWriter) -> None:
        ids = writer.turn("T", "Hi", (("get_weather", (("city", "string", "Oslo"),)),))
        stub.plan = lambda _: says(ids, end_of_msg=END_OF_MSG)
        choice = (await gateway.ask(chat_with_tool(tool_choice="none")))["choices"][0]
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"

    @pytest.mark.parametrize("choice", ["any", {"type": "function", "function": {"name": "missing"}}, 1])
    async def test_another_choice_is_refused(self, gateway: Running, choice: Any) -> None:
        assert (await refused(gateway, chat_with_tool(tool_choice=choice)))["param"].startswith("tool_choice")


class TestPreservedThinking:
    """The two tests of preserved thinking that the verifier skips, made certain: they look at the prompt."""

    async def test_thinking_of_the_history_is_in_the_prompt_and_is_counted(
        self, gateway: Running, stub: StubEngine
    ) -> None:
        secret = "4711 0815 1234"
        turns = [{"role": "assistant", "content": "Noted.", "reasoning_content": text} for text in (secret, "")]
        with_it, without = [
            await gateway.ask(chat() | {"messages": [user("Choose."), turn, user("Say them.")]}) for turn in turns
        ]
        counts = [answer["usage"]["prompt_tokens"] for answer in (with_it, without)]
        assert counts[0] - counts[1] == len(secret.encode())  # one token per byte in this vocabulary
        assert bytes(i for i in stub.requests[0]["input_ids"] if i < 256).count(secret.encode()) == 1

    async def test_the_prompt_of_the_next_turn_counts_the_whole_turn_before(
        self, gateway: Running, stub: StubEngine
    ) -> None:
        body = chat()
        first = await gateway.ask(body)
        following = await gateway.ask(continued(body, first, user("And now?")))
        before = stub.requests[0]["input_ids"]
        assert stub.requests[1]["input_ids"][: len(before)] == before
        assert following["usage"]["prompt_tokens"] > first["usage"]["total_tokens"]
