"""A long agent session: is every prompt the last one plus what was generated, what is cached, what compressing does.

python -m k3_sglang.launch --model tiny-random --served-name tiny &
python benchmarks/agent_session.py --tokenizer DIR [--steps 200] [--compress-at 20000]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_runtime.compression.count import EncoderMeter
from agent_runtime.compression.trigger import CompressionSettings
from agent_runtime.engine.openai_chat import ChatClient, ChatSettings
from agent_runtime.events import CompressionFinished, Event, StepFinished, StepRecord, StepRetried, StepStarted
from agent_runtime.limits import Limits, Retries
from agent_runtime.loop import Agent, AgentOptions
from agent_runtime.tools.registry import ToolRegistry, tool
from k3_sglang.chat.tokenizer import K3Tokenizer

SYSTEM = "You look after a garden. Look at every bed before you say that all is well. " * 8
ROWS = 10


@tool
async def look(where: str) -> str:
    """Looks at a bed.

    Args:
        where: Which bed.
    """
    return f"Bed {where[:40]!r} is dry, the one beside it is not."


@dataclass
class Session:
    """What was seen of a session."""

    counted: list[int | None] = field(default_factory=list[int | None])
    """Tokens of each step's prompt, computed before it was sent."""
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    compressions: list[CompressionFinished] = field(default_factory=list[CompressionFinished])
    retries: int = 0

    @property
    def divergences(self) -> list[int]:
        """Steps, from 1, whose prompt was not the one computed from the last one and what was generated."""
        pairs = zip(self.counted, self.steps, strict=False)
        return [n for n, (count, step) in enumerate(pairs, 1) if count != step.prompt_tokens]


async def run(options: argparse.Namespace) -> Session:
    """Give tasks until there are so many steps."""
    seen = Session()
    meter = EncoderMeter(K3Tokenizer.from_dir(options.tokenizer))
    compression = CompressionSettings(
        options.compress_at, user_tokens=1000, user_head_tokens=200, summary_tokens=options.max_output_tokens
    )
    settings = ChatSettings(max_output_tokens=options.max_output_tokens, temperature=options.temperature)
    async with ChatClient(options.base_url, settings=settings) as client:
        agent = Agent(
            client,
            ToolRegistry([look]),
            SYSTEM,
            meter=meter,
            limits=Limits(max_steps=5, retries=Retries(unusable=0)),
            options=AgentOptions(compression),
        )

        def watch(event: Event) -> None:
            if isinstance(event, StepStarted):
                seen.counted.append(meter.count(agent.conversation.messages, agent.tools))
            elif isinstance(event, StepFinished):
                seen.steps.append(event.record)
            elif isinstance(event, CompressionFinished):
                seen.compressions.append(event)
            elif isinstance(event, StepRetried):
                seen.retries += 1

        while len(seen.steps) < options.steps:
            await agent.run(f"Water bed {len(seen.steps)} and tell me how it is.", on_event=watch)
    return seen


def show(seen: Session, seconds: float, console: Console) -> None:
    """Print a table of step ranges and what was found."""
    table = Table("steps", "prompt tokens", "cached", "share", "largest prompt")
    size = max(1, len(seen.steps) // ROWS)
    for start in range(0, len(seen.steps), size):
        part = seen.steps[start : start + size]
        prompt, cached = (sum(n or 0 for n in counts) for counts in _columns(part))
        largest = max(step.prompt_tokens or 0 for step in part)
        share = f"{cached / prompt:.1%}" if prompt else "-"
        table.add_row(f"{start + 1}-{start + len(part)}", f"{prompt:,}", f"{cached:,}", share, f"{largest:,}")
    console.print(table)
    wrong = seen.divergences
    exact = len(seen.steps) - len(wrong)
    console.print(f"{exact} of {len(seen.steps)} prompts as computed beforehand, to the token; {seconds:.0f} s")
    if wrong:
        console.print(f"first divergence at step {wrong[0]}")
    for done in seen.compressions:
        cached = [usage.cached_tokens for usage in done.summary_usage]
        console.print(
            f"{done.outcome}: {done.before_tokens} → {done.after_tokens} tokens, calls {done.calls}, cached {cached}"
        )


def _columns(steps: list[StepRecord]) -> tuple[list[int | None], list[int | None]]:
    return [step.prompt_tokens for step in steps], [step.cached_tokens for step in steps]


def main() -> int:
    """0 when every prompt was as computed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the served model's tokenizer")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compress-at", type=int, default=20_000, help="tokens (%(default)s)")
    parser.add_argument("--max-output-tokens", type=int, default=400, help="per answer (%(default)s)")
    parser.add_argument("--temperature", type=float, help="default: the endpoint's")
    options = parser.parse_args()
    started = time.monotonic()
    seen = asyncio.run(run(options))
    show(seen, time.monotonic() - started, Console(highlight=False))
    return 1 if seen.divergences else 0


if __name__ == "__main__":
    sys.exit(main())
