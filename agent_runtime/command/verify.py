"""`verify`: check any endpoint for preserved thinking and print what was found."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import openai
from rich.console import Console
from rich.table import Table

from agent_runtime.verify import Asked, Report, verify
from k3_sglang.chat.tokenizer import K3Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("base_url", help="endpoint, for example http://127.0.0.1:30000/v1")
    parser.add_argument("--model", help="served model; default: the first the endpoint lists")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--tokenizer", type=Path, help="folder with K3's tokenizer: counts are then checked exactly")
    parser.add_argument("--answer-tokens", type=int, default=4096, help="output limit where the answer is read")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """0 when thinking is preserved, 1 when it is not or cannot be told, 2 when the endpoint cannot be asked."""
    try:
        report = asyncio.run(_report(options))
    except (openai.OpenAIError, OSError, ValueError) as error:
        print(f"error: {options.base_url}: {error}")
        return 2
    if options.json:
        print(json.dumps({"verdict": report.verdict, **asdict(report)}))
    else:
        show(report, Console(highlight=False))
    return 0 if report.verdict == "preserved" else 1


def show(report: Report, console: Console) -> None:
    """Print a report."""
    if report.refusal:
        console.print(f"The endpoint refused a history with thinking: {report.refusal}", markup=False)
    table = Table("thinking of", "prompt tokens", "expected", "kept", "fact recalled")
    for place in report.places:
        expected = "?" if place.expected_tokens is None else str(place.expected_tokens)
        tokens = "?" if place.tokens is None else str(place.tokens)
        table.add_row(place.place, tokens, expected, _yes(place.kept), _yes(place.recalled))
    console.print(table)
    console.print(f"turns independent of each other: {_yes(report.additive)}")
    console.print(f"thinking under the key `reasoning` counts too: {_yes(report.other_key)}")
    console.print(f"a history without thinking is refused: {_yes(report.missing_refused)}")
    if report.guessed:
        console.print(f"the model named {report.guessed} facts it was never given: recall means nothing here")
    console.print(f"verdict: {report.verdict}")


def _yes(value: bool | None) -> str:
    return "?" if value is None else "yes" if value else "no"


async def _report(options: argparse.Namespace) -> Report:
    count = None
    if options.tokenizer is not None:
        tokenizer = K3Tokenizer.from_dir(options.tokenizer)

        def count_tokens(text: str) -> int:
            return len(tokenizer.encode_text(text))

        count = count_tokens
    async with openai.AsyncOpenAI(base_url=options.base_url, api_key=options.api_key, max_retries=2) as client:
        model = options.model or (await client.models.list()).data[0].id

        async def ask(messages: list[dict[str, Any]], tools: list[dict[str, Any]], limit: int) -> Asked:
            sent, declared = cast(Any, messages), cast(Any, tools)
            try:
                made = await client.chat.completions.create(
                    model=model, messages=sent, tools=declared, max_completion_tokens=limit
                )
            except openai.BadRequestError as error:
                return Asked(None, "", str(error))
            usage = made.usage
            return Asked(None if usage is None else usage.prompt_tokens, made.choices[0].message.content or "")

        return await verify(ask, count=count, answer_tokens=options.answer_tokens)
