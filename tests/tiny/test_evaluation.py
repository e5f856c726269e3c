"""The evaluation counts right and wrong answers right, through the real gateway and with the agent's real tools."""

from __future__ import annotations

import argparse
import io
import json
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.encode import encode
from k3_sglang.chat.request import parse_request
from k3_sglang.tiny.__main__ import main
from k3_sglang.tiny.data.coding import report
from k3_sglang.tiny.data.facts import KEPT, UNKNOWN
from k3_sglang.tiny.data.functions import diagnosis
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.project import Project, project
from k3_sglang.tiny.data.vocabulary import tokenizer
from k3_sglang.tiny.evaluate.command import SKILLS, Progress, add_arguments, evaluate
from k3_sglang.tiny.evaluate.following import MAKERS
from k3_sglang.tiny.evaluate.outcome import Case, rates, wilson
from k3_sglang.tiny.evaluate.outcome import report as json_report
from tests.gateway.serving import serving
from tests.gateway.stub_engine import Script, StubEngine, says
from tests.gateway.vocabulary import TurnWriter

Answer = Callable[[str], list[int]]
"""From the text of a prompt to the ids of the turn."""

KNOWN = tokenizer()
WRITE = TurnWriter(KNOWN)
COUNT = 6


@asynccontextmanager
async def served(answer: Answer, folder: Path) -> AsyncGenerator[str]:
    """The gateway before an engine that answers like this."""

    def plan(body: dict[str, Any]) -> Script:
        return says(answer(KNOWN.decode(body["input_ids"])), end_of_msg=KNOWN.special.end_of_msg, piece=100)

    settings = GatewaySettings(model="tiny", tokenizer_dir=folder, context_len=20_000)
    async with (
        serving(StubEngine(plan).app()) as engine,
        serving(create_app(settings, SGLangEngine(engine), KNOWN)) as url,
    ):
        yield f"{url}/v1"


async def figures(answer: Answer, folder: Path, skill: str, count: int = COUNT) -> dict[str, float]:
    """Rates by measure."""
    async with served(answer, folder) as url:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        options = parser.parse_args(["--endpoint", url, "--skills", skill, "--count", str(count)])
        cases = (await evaluate(options))[skill]
    assert [case.problem for case in cases if not case.verdicts] == []
    return {measure: rate.value for measure, rate in rates(cases).items()}


def answers_of(skill: str) -> dict[str, list[int]]:
    """What the data says comes after each prompt of the evaluation's own cases."""
    found: dict[str, list[int]] = {}
    for number in range(COUNT):
        made = MAKERS[skill](Draw(f"eval/0/{skill}/{number}", "held_out"))
        whole = made.sample(KNOWN).ids
        for place, message in enumerate(made.messages):
            if message["role"] == "assistant":
                prompt = encode(parse_request(made.body(made.messages[:place]) | {"reasoning_effort": "max"}), KNOWN)
                end = whole.index(KNOWN.special.end_of_msg, len(prompt.ids)) + 1
                found[KNOWN.decode(prompt.ids)] = list(whole[len(prompt.ids) : end])
    return found


@pytest.mark.parametrize("skill", sorted(MAKERS))
async def test_a_model_that_answers_as_the_data_does_is_right_throughout(skill: str, tmp_path: Path) -> None:
    answers = answers_of(skill)
    assert set((await figures(answers.__getitem__, tmp_path, skill)).values()) == {1.0}


@pytest.mark.parametrize("skill", sorted(MAKERS))
async def test_a_model_that_says_something_else_is_wrong(skill: str, tmp_path: Path) -> None:
    wrong = WRITE.turn("Hm.", "Something else.")
    found = await figures(lambda _: wrong, tmp_path, skill)
    assert found
    assert set(found.values()) == {0.0}


async def test_a_call_with_one_wrong_character_is_wrong(tmp_path: Path) -> None:
    answers = answers_of("files")

    def nearly(prompt: str) -> list[int]:
        text = KNOWN.decode(answers[prompt])
        if 'key="path"' not in text:
            return answers[prompt]
        return WRITE.turn("", "", (("read_file", (("path", "string", "wrong.py"),)),))

    assert (await figures(nearly, tmp_path, "files"))["files: call"] < 1.0


def attentive(prompt: str) -> list[int]:
    """Chooses a secret that varies, and later repeats the one that its thinking holds."""
    last = prompt.rpartition('role="user"')[2]
    held = re.findall(r"think<\|sep\|>The (number|code word|choice) is (\S+?)\.<", prompt)
    if KEPT not in prompt:
        options = re.search(r"of these: (.+?)\. ", prompt)
        kind = "choice" if options else "number" if "number" in last else "code word"
        value = options[1].split(", ")[len(prompt) % 4] if options else "41" if kind == "number" else "kavoru"
        return WRITE.turn(f"The {kind} is {value}.", KEPT)
    return WRITE.turn("", f"The {held[0][0]} is {held[0][1]}." if held else UNKNOWN)


async def test_what_was_thought_is_recalled_when_it_is_kept_or_put_back_by_the_gateway_and_only_then(
    tmp_path: Path,
) -> None:
    found = await figures(attentive, tmp_path, "facts", 12)
    assert found["facts: chosen in thinking, not said"] == 1.0
    assert found["facts, thinking kept: all"] == 1.0
    assert found["facts, thinking put back: all"] == 1.0
    assert found["facts, thinking dropped: all"] == 0.0
    assert found["facts, thinking dropped: says it does not know"] == 1.0
    assert found["facts, thinking foreign: all"] == 0.0
    assert found["facts, thinking foreign: says the foreign one"] == 1.0


def test_progress_has_a_line_for_every_twentieth_of_the_cases() -> None:
    for total, lines in ((3, 3), (20, 20), (400, 20)):
        out = io.StringIO()
        progress = Progress(total, out)
        for _ in range(total):
            progress.one_done()
        shown = out.getvalue().splitlines()
        assert len(shown) == lines and shown[-1].startswith(f"{total} of {total} cases, ")


async def test_a_secret_that_is_said_aloud_is_no_case_of_recall(tmp_path: Path) -> None:
    found = await figures(lambda _: WRITE.turn("The number is 41.", "It is 41."), tmp_path, "facts")
    assert found == {"facts: chosen in thinking, not said": 0.0}


def noting(*, forgets: bool) -> Answer:
    """Looks facts up, writes them down when asked to, and answers from what it can see."""

    def answer(prompt: str) -> list[int]:
        last = prompt.rpartition('role="user"')[2]
        facts = dict(re.findall(r"The (\w+) is ([\w-]+)\.", prompt))
        if 'role="tool"' in last:
            subject = re.findall(r'key="subject" type="string"<\|sep\|>(\w+)', last)[-1]
            value = re.findall(r'role="tool" tool="lookup" index="1"<\|sep\|>([\w-]+)', last)[-1]
            return WRITE.turn("", f"The {subject} is {value}.")
        if "about to be shortened" in last:
            kept = list(facts.items())[1 if forgets else 0 :]
            return WRITE.turn("", "Facts:" + "".join(f" The {key} is {value}." for key, value in kept))
        asked = re.findall(r"(?:the|Which) (\w+)", last)[0]
        if re.search(r"ind out|ook up|ook it up", last):
            return WRITE.turn("", "", (("lookup", (("subject", "string", asked),)),))
        return WRITE.turn("", f"The {asked} is {facts.get(asked, 'gone')}.")

    return answer


@pytest.mark.parametrize("forgets", [False, True])
async def test_facts_that_the_summary_forgets_are_not_recalled(forgets: bool, tmp_path: Path) -> None:
    found = await figures(noting(forgets=forgets), tmp_path, "compression")
    assert found["compression: looked up before"] == found["compression: summary written"] == 1.0
    assert found["compression: all facts in the summary"] == float(not forgets)
    assert found["compression: all facts recalled after it"] == float(not forgets)


def engineer(made: Project, *, fixes: bool) -> Answer:
    """Works through the steps of a repair; does it right or leaves the bug in."""
    run = (("run_command", (("command", "string", "python -m unittest"),)),)
    edits: list[list[int]] = []
    for function, bug in made.broken:
        new = bug.right if fixes else f"{bug.wrong}  # looked at"
        values = (("path", "string", made.source_file), ("old", "string", bug.wrong), ("new", "string", new))
        edits += [WRITE.turn(diagnosis(function, bug), "", (("replace_in_file", values),)), WRITE.turn("", "", run)]
    turns = [
        WRITE.turn("", "", (("list_files", ()),)),
        WRITE.turn("", "", run),
        *edits,
        WRITE.turn("", report(made)),
        WRITE.turn("", "", run),
        WRITE.turn("", report(made)),
    ]
    return lambda prompt: turns[prompt.count('role="assistant"') - 1]


@pytest.mark.parametrize("fixes", [False, True])
async def test_a_repair_counts_when_the_real_tests_pass_afterwards(fixes: bool, tmp_path: Path) -> None:
    draw = Draw("eval/0/coding/0", "held_out")
    made = project(draw, 2 if draw.chance(0.2) else 1)
    found = await figures(engineer(made, fixes=fixes), tmp_path, "coding", 1)
    assert found["coding: bug fixed"] == float(fixes)
    if fixes:
        assert set(found.values()) == {1.0}


def test_wilsons_interval_has_its_known_values_and_stays_inside_of_zero_and_one() -> None:
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=5e-5)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=5e-5)
    with pytest.raises(ValueError, match="right=3 of count=2"):
        wilson(3, 2)


def test_the_digest_of_two_runs_differs_when_a_greedy_output_does() -> None:
    def digest(text: str, *, greedy: bool) -> str:
        return json_report({}, {"chat": [Case({"m": True}, outputs=[text], greedy=greedy)]})["greedy_sha256"]

    assert digest("a", greedy=True) == digest("a", greedy=True) != digest("b", greedy=True)
    assert digest("a", greedy=False) == digest("b", greedy=False)


def test_the_command_fails_when_nobody_answers(
    free_port: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--endpoint", f"http://127.0.0.1:{free_port()}/v1", "--count", "1"]) == 1
    assert "nothing answers at" in capsys.readouterr().err


def test_the_command_writes_a_table_and_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.agent.scripted_endpoint import says as replies
    from tests.agent.scripted_endpoint import serve

    out = tmp_path / "figures.json"
    with serve(replies("Something else.")) as endpoint:
        arguments = ["eval", "--endpoint", endpoint.base_url, "--skills", "chat", "tools", "--count", "2"]
        assert main([*arguments, "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    figure = found["measures"]["chat: answer"]
    assert (figure["right"], figure["count"], figure["rate"]) == (0, 2, 0.0)
    assert figure["interval"] == pytest.approx([0.0, 0.6576], abs=5e-5)
    assert [len(group) for group in found["cases"].values()] == [2, 2]
    assert "chat: answer" in capsys.readouterr().out
    assert set(SKILLS) >= set(found["cases"])
