"""Signatures that a client mixes up: no turn ever gets the thinking of another."""

from typing import Any

from tests.gateway.conftest import Running
from tests.gateway.messages import ask, continued, post, text
from tests.gateway.stub_engine import StubEngine, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
Json = dict[str, Any]


def asked_of(stub: StubEngine) -> str:
    """The text of the last prompt."""
    return bytes(token for token in stub.requests[-1]["input_ids"] if token < 256).decode()


def signed(said: str, signature: str) -> Json:
    """A turn from a client that keeps signatures only."""
    return {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": signature}, text(said)]}


def says_user(said: str) -> Json:
    return {"role": "user", "content": said}


async def two_turns(gateway: Running, stub: StubEngine, writer: TurnWriter) -> tuple[str, str]:
    """A session of two turns; their signatures."""
    body, signatures = ask("q1"), list[str]()
    for number in (1, 2):
        ids = writer.turn(f"thinking {number}", f"answer {number}")
        stub.plan = lambda _, ids=ids: says(ids, end_of_msg=END_OF_MSG)
        answer = await post(gateway, body)
        signatures.append(answer["content"][0]["signature"])
        body = continued(body, answer, says_user(f"q{number + 1}"))
    return signatures[0], signatures[1]


async def test_a_signature_on_two_turns_gives_each_its_own_thinking(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    first, _ = await two_turns(gateway, stub, writer)
    history = [says_user("q1"), signed("answer 1", first), says_user("q2"), signed("answer 2", first), says_user("q3")]
    answer = await post(gateway, {**ask(), "messages": history})
    assert answer["k3"]["replay"]["turns"] == [{"index": 3, "verdict": "repaired", "reason": "absent"}]
    assert asked_of(stub).count("thinking 1") == asked_of(stub).count("thinking 2") == 1


async def test_signatures_in_each_others_place_give_each_turn_its_own_thinking(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    first, second = await two_turns(gateway, stub, writer)
    history = [says_user("q1"), signed("answer 1", second), says_user("q2"), signed("answer 2", first), says_user("q3")]
    answer = await post(gateway, {**ask(), "messages": history})
    assert answer["k3"]["replay"]["repaired"] == 2
    prompt = asked_of(stub)
    assert prompt.index("thinking 1") < prompt.index("answer 1") < prompt.index("thinking 2") < prompt.index("answer 2")


async def test_a_signature_on_another_text_of_another_session_gives_nothing(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    first, second = await two_turns(gateway, stub, writer)
    for signature in (first, second):
        history = [says_user("elsewhere"), signed("something else", signature), says_user("go on")]
        answer = await post(gateway, {**ask(), "messages": history})
        assert answer["k3"]["replay"]["turns"] == [{"index": 1, "verdict": "missing", "reason": "unknown"}]
        assert "thinking 1" not in asked_of(stub) and "thinking 2" not in asked_of(stub)


async def test_a_text_that_was_changed_in_its_place_keeps_its_thinking(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    first, second = await two_turns(gateway, stub, writer)
    history = [says_user("q1"), signed("ANSWER", first), says_user("q2"), signed("answer, 2", second), says_user("q3")]
    answer = await post(gateway, {**ask(), "messages": history})
    edited = [{"index": index, "verdict": "repaired", "reason": "edited"} for index in (1, 3)]
    assert answer["k3"]["replay"]["turns"] == edited
    assert asked_of(stub).index("thinking 1") < asked_of(stub).index("thinking 2")
