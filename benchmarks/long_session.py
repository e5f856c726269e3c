"""One session of many turns through gateway and engine: is every prompt the one before it plus what was generated?

    python benchmarks/long_session.py --turns 200      # starts its own server; some minutes on two cores

The client drops all thinking, as most do. Ids are read back from the ledger and compared here, without the gateway's
word for it. In the end a turn in the middle is edited, and the first id that differs is told.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from servers import launched

from agent_runtime.guard.again import made_again
from agent_runtime.ledger.reading import LedgerReader
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.tiny.checkpoint import ensure

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "maxLength": 8}}},
    },
}


@dataclass(frozen=True)
class Step:
    """What the gateway said about one request."""

    prompt_tokens: int
    cached_tokens: int
    verdict: str
    holds: bool | None
    lost_tokens: int


def ask(client: httpx.Client, body: dict[str, Any]) -> tuple[dict[str, Any], Step]:
    """The assistant message of an answer, and the facts about its prompt."""
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    usage, replay = answer["usage"], answer["k3"]["replay"]
    prefix = replay.get("prefix", {"holds": None})
    step = Step(
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        replay["verdict"],
        prefix["holds"],
        prefix.get("lost_tokens", 0),
    )
    return answer["choices"][0]["message"], step


def session(client: httpx.Client, turns: int) -> tuple[list[Step], dict[str, Any]]:
    """The steps of a session whose client drops thinking, and its last body."""
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Look around."}],
        "tools": [TOOL],
        "temperature": 1.0,
        "max_tokens": 400,
        "prompt_cache_key": "long session",
    }
    steps: list[Step] = []
    for turn in range(turns):
        message, step = ask(client, body)
        steps.append(step)
        message.pop("reasoning_content", None)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"seen {turn}"}
            for call in message.get("tool_calls") or ()
        ]
        body["messages"] += [message, *(results or [{"role": "user", "content": f"Go on, {turn}."}])]
    return steps, body


def extended(path: Path) -> tuple[int, int]:
    """Steps on record whose prompt begins with the one before and its output, of all that have one before."""
    with LedgerReader(path) as reader:
        outputs = {record.step: record.ids for record in reader.turns()}
        prompts = [(step.id, reader.prompt_ids(step.id)) for step in reader.steps()]
    pairs = list(zip(prompts, prompts[1:], strict=False))
    held = sum(after[: len(before) + len(outputs[at])] == before + outputs[at] for (at, before), (_, after) in pairs)
    return held, len(pairs)


def edited(client: httpx.Client, body: dict[str, Any]) -> Step:
    """The last request once more, a turn in its middle changed."""
    changed = copy.deepcopy(body)
    turns = [message for message in changed["messages"] if message["role"] == "assistant"]
    turns[len(turns) // 2]["content"] = "edited"
    return ask(client, changed)[1]


def main() -> int:
    """Run and print; exit code 1 when a prompt did not begin as it had to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.db"
        arguments = ["--model", "tiny-random", "--served-name", "tiny", "--ledger", str(ledger)]
        with (
            launched(arguments) as server,
            httpx.Client(base_url=server.gateway_url, timeout=600, trust_env=False) as client,
        ):
            steps, body = session(client, options.turns)
            held, pairs = extended(ledger)
            last = edited(client, body)
        with LedgerReader(ledger) as reader:
            again = [outcome.same for outcome in made_again(reader, K3Tokenizer.from_dir(ensure()))]
            problems = reader.check()
        size = ledger.stat().st_size
    table = Table(title=f"one session of {options.turns} turns, its client drops all thinking")
    for column in ("turn", "prompt tokens", "cached tokens", "verdict", "prefix holds"):
        table.add_column(column, justify="right")
    for place in sorted({0, 1, *range(9, len(steps), max(1, len(steps) // 10)), len(steps) - 1}):
        step = steps[place]
        table.add_row(*map(str, (place + 1, step.prompt_tokens, step.cached_tokens, step.verdict, step.holds)))
    Console().print(table)
    prompt_tokens, cached_tokens = sum(s.prompt_tokens for s in steps), sum(s.cached_tokens for s in steps)
    print(f"prompts that begin with the one before and its output: {held} of {pairs}")
    print(f"cached: {cached_tokens} of {prompt_tokens} prompt tokens ({cached_tokens / prompt_tokens:.1%})")
    print(f"an edited turn: verdict {last.verdict}, {last.lost_tokens} tokens lost")
    print(
        f"ledger: {size} bytes, {len(problems)} problems, {again.count(True)} of {len(again)} prompts made again alike"
    )
    return 0 if held == pairs and not problems and all(again) and last.holds is False else 1


if __name__ == "__main__":
    sys.exit(main())
