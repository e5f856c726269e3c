"""Training data of the tiny model: reproducible, token for token what the gateway sends, and split by names."""

from __future__ import annotations

import ast
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.compression.prompts import instruction, summary_message
from agent_runtime.tools.files import file_tools
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.shell import shell_tool
from k3_sglang.chat.encode import encode
from k3_sglang.chat.parse import TurnParser
from k3_sglang.chat.request import parse_request
from k3_sglang.tiny.data import MIXES, samples
from k3_sglang.tiny.data.agent_texts import agent_texts
from k3_sglang.tiny.data.names import SYLLABLES, WORDS, Draw, Split, is_held_out
from k3_sglang.tiny.data.stream import SKILLS, talk
from k3_sglang.tiny.data.vocabulary import BASE_TOKENS, build_tokenizer, tokenizer, train

SHORTEST = 1400


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_a_conversation_depends_on_seed_and_number_only(mix: str) -> None:
    first = list(islice(samples(5, mix=mix), 12))
    assert list(islice(samples(5, mix=mix, start=3, step=4), 3)) == first[3::4]
    assert list(islice(samples(6, mix=mix), 12)) != first


def test_a_conversation_that_is_too_long_is_replaced_and_an_impossible_limit_is_an_error() -> None:
    assert max(len(made.ids) for made in islice(samples(0, max_len=SHORTEST), 100)) <= SHORTEST
    with pytest.raises(ValueError, match="max_len=20 is too short for mix 'coding'"):
        next(samples(0, mix="coding", max_len=20))


@pytest.mark.parametrize("skill", sorted(SKILLS))
def test_every_prompt_is_the_one_the_gateway_sends_and_every_turn_reads_as_it_was_meant(skill: str) -> None:
    known = tokenizer()
    for number in range(5):
        made = SKILLS[skill](Draw(f"{skill}/{number}", "train"))
        whole = made.sample(known)
        for place, message in enumerate(made.messages):
            if message["role"] != "assistant" or (made.tool_choice and place + 1 < len(made.messages)):
                continue
            prompt = encode(parse_request(made.body(made.messages[:place])), known)
            assert whole.ids[: len(prompt.ids)] == prompt.ids
            end = whole.ids.index(known.special.end_of_msg, len(prompt.ids)) + 1
            assert set(whole.weights[len(prompt.ids) : end]) == {made.weights[place]}
            parser = TurnParser(known, start="think")
            parser.feed(whole.ids[len(prompt.ids) : end])
            parser.finish("stop")
            assert (parser.turn.reasoning, parser.turn.content) == (message["reasoning_content"], message["content"])
            wanted = [call["function"]["name"] for call in message.get("tool_calls", ())]
            assert [call.name for call in parser.turn.calls] == wanted
        assert len(whole.ids) == len(whole.weights)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(sorted(MIXES)))
def test_only_the_assistants_tokens_have_full_weight(number: int, mix: str) -> None:
    made = talk(1, "train", mix, number)
    found = made.sample(tokenizer())
    assert set(found.weights) <= {0.0, 0.1, 0.25, 1.0}
    own = sum(len(tokenizer().encode_text(str(m["content"]))) for m in made.messages if m["role"] == "assistant")
    assert sum(weight == 1.0 for weight in found.weights) >= own * (0.0 not in made.weights)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_names_numbers_and_paths_belong_to_their_split(split: str) -> None:
    draw = Draw("names", "train" if split == "train" else "held_out")
    drawn = [make() for _ in range(40) for make in (draw.name, draw.code, lambda: str(draw.number()))]
    assert {is_held_out(name) for name in drawn} == {split == "held_out"}
    assert len(set(drawn)) == len(drawn)


def test_names_of_some_training_conversations_are_easily_confused_and_never_those_of_the_evaluation() -> None:
    def syllables(split: Split, seed: int) -> int:
        draw = Draw(f"few/{seed}", split)
        names = "".join(draw.name(3) for _ in range(60))
        return len({names[place : place + 2] for place in range(0, len(names), 2)})

    train = [syllables("train", seed) for seed in range(200)]
    few = [count for count in train if count <= 20]
    assert 50 < len(few) < 110 and min(few) >= 8
    assert all(count > 30 for count in train if count > 20)
    assert min(syllables("held_out", seed) for seed in range(100)) > 30


@pytest.mark.parametrize("lead", [" ", '"', "/", "_", "(", "`", "'", "-", ".", "[", "=", "test_"])
def test_a_name_is_cut_the_same_way_wherever_it_stands(lead: str) -> None:
    draw, known = Draw("cuts", "train"), tokenizer()
    for name in (*WORDS, *(draw.name() for _ in range(200))):
        plain = known.encode_text(name)
        assert known.encode_text(lead + name)[-len(plain) :] == plain
        assert known.encode_text(f"{lead}{name}.py")[-len(plain) - 1 : -1] == plain


def test_made_up_names_are_cut_into_their_syllables() -> None:
    known = tokenizer()
    assert known.decode(known.encode_text("kavoru")) == "kavoru"
    assert [known.decode([token]) for token in known.encode_text("kavoru")] == ["ka", "vo", "ru"]
    assert all(len(known.encode_text(syllable)) == 1 for syllable in SYLLABLES)
    assert known.base_tokens == BASE_TOKENS


def test_the_trainer_takes_frequent_words_whole_and_never_joins_syllables_or_digits() -> None:
    texts = [f"{word} says kavo 4141 to the kavo" for word in ("one", "the") for _ in range(50)]
    pieces = train(texts, 323)
    assert {b" says", b" the"} < set(pieces)
    known = build_tokenizer(pieces)
    assert [known.decode([token]) for token in known.encode_text(" kavo 41")] == [" ", "ka", "vo", " ", "4", "1"]
    with pytest.raises(ValueError, match="frequent words"):
        train(["too short"], BASE_TOKENS)
    with pytest.raises(ValueError, match="base_tokens=300"):
        train(texts, 300)


def test_the_agents_texts_are_the_agents_own(tmp_path: Path, repository: Path) -> None:
    texts = agent_texts()
    module = ast.parse((repository / "examples" / "coding_agent.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(node.targets[0]): node.value for node in module.body if isinstance(node, ast.Assign)}
    assert texts.system == ast.literal_eval(assigned["SYSTEM"])
    assert list(texts.tools) == list(ToolRegistry([*file_tools(tmp_path), shell_tool(tmp_path)]).schemas())
    assert texts.summary_instruction == instruction()
    assert summary_message("S", (), "") == f"{texts.summary_head}\n\nS"
