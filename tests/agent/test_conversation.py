"""The history can only grow, keeps calls and results paired, and is saved as the model sees it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.conversation import Conversation, ConversationError, Message, ToolCall, from_wire, to_wire
from k3_sglang.chat.types import TextPart

CALLS = (ToolCall("a", "read", '{"x":  1}'), ToolCall("b", "run", "{}"))
ASK = Message(role="assistant", content="", reasoning="because", tool_calls=CALLS)


def result(id: str) -> Message:
    return Message(role="tool", content=f"result {id}", tool_call_id=id)


def test_an_assistant_message_goes_back_whole_and_its_arguments_verbatim() -> None:
    assert to_wire(ASK) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "because",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "read", "arguments": '{"x":  1}'}},
            {"id": "b", "type": "function", "function": {"name": "run", "arguments": "{}"}},
        ],
    }


def test_a_turn_without_thinking_says_so_explicitly() -> None:
    assert to_wire(Message(role="assistant", content="hi"))["reasoning_content"] == ""


def test_calls_wait_for_their_results() -> None:
    history = Conversation([Message(role="user", content="go"), ASK])
    assert history.open_calls == CALLS
    with pytest.raises(ConversationError, match=r"user message while calls \['a', 'b'\] wait"):
        history.append(Message(role="user", content="and?"))
    history.append(result("b"))
    with pytest.raises(ConversationError, match=r"result for call 'b'; calls that wait for one: \['a'\]"):
        history.append(result("b"))
    history.append(result("a"))
    history.append(Message(role="user", content="and?"))
    assert history.open_calls == () and len(history) == 5


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Message(role="user", content=" \n"), "blank user message"),
        (Message(role="user"), "blank user message"),
        (Message(role="user", content="a\ud800"), "user message with half of a surrogate pair"),
        (Message(role="assistant", content=""), "empty assistant message"),
        (result("x"), "result for call 'x'"),
        (Message(role="assistant", tool_calls=(ToolCall("", "f", "{}"),)), "empty or not unique"),
        (Message(role="assistant", tool_calls=(CALLS[0], CALLS[0])), "empty or not unique"),
    ],
)
def test_messages_that_would_confuse_the_model_are_refused(message: Message, words: str) -> None:
    history = Conversation()
    with pytest.raises(ConversationError, match=words):
        history.append(message)
    assert len(history) == 0


def test_a_call_id_is_never_used_twice() -> None:
    history = Conversation([ASK, result("a"), result("b")])
    with pytest.raises(ConversationError, match="not unique in this conversation"):
        history.append(ASK)


def test_what_was_handed_out_does_not_change_the_history() -> None:
    history = Conversation([ASK])
    history.wire()[0]["reasoning_content"] = "something else"
    history.wire().clear()
    assert history.wire() == [to_wire(ASK)]


def test_content_parts_are_refused_loudly() -> None:
    with pytest.raises(ConversationError, match="list as content"):
        to_wire(Message(role="user", content=(TextPart("x"),)))


text = st.text(st.characters(codec="utf-8"))


@given(reasoning=text, content=text, arguments=text, answer=text)
def test_saving_and_loading_gives_the_same_request(reasoning: str, content: str, arguments: str, answer: str) -> None:
    history = Conversation(
        [
            Message(role="system", content="be good"),
            Message(role="user", content=f"go {content}"),
            Message(
                role="assistant",
                content=content,
                reasoning=reasoning,
                tool_calls=(ToolCall("a", "f", arguments),),
            ),
            Message(role="tool", content=answer, tool_call_id="a"),
        ]
    )
    again = Conversation.load(history.dump())
    assert json.dumps(again.wire()) == json.dumps(history.wire())
    assert again.messages == history.messages


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 of a saved conversation is not JSON"),
        ("[]", "line 2 of a saved conversation is not a JSON object"),
        ('{"role": "robot"}', "not a saved message"),
        ('{"role": "user", "content": "x", "colour": 1}', "not a saved message: keys .*colour"),
        ('{"role": "assistant", "tool_calls": [{"id": "a"}]}', "a saved tool call is incomplete"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(line: str, words: str) -> None:
    with pytest.raises(ConversationError, match=words):
        Conversation.load('{"role": "user", "content": "x"}\n' + line)


def test_wire_and_message_are_inverse_for_every_role() -> None:
    for message in (ASK, result("a"), Message(role="system", content="s"), Message(role="user", content="u", name="n")):
        again = from_wire(to_wire(message))
        assert to_wire(again) == to_wire(message)
