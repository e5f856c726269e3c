"""Print an agent's steps as a table that grows while the agent works."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from agent_runtime.events import StepRecord, ToolRun
from agent_runtime.tools.result import one_line

_COLUMNS = (
    ("step", 4),
    ("prompt", 7),
    ("cached", 7),
    ("new", 6),
    ("output", 6),
    ("TTFT ms", 7),
)
_TOOL_WIDTH = 15


@dataclass(slots=True)
class StepTable:
    """One row per step, and a further one for each further call of the step; remembers what it printed."""

    console: Console
    records: list[StepRecord] = field(default_factory=list[StepRecord])

    def header(self) -> None:
        """Print the column names. Counts are tokens; `new` is the part of the prompt that was not cached."""
        names = [name for name, _ in _COLUMNS]
        self._row([*names, "tool", "result"], style="bold")

    def add(self, record: StepRecord) -> None:
        """Print a step. Steps are numbered through the whole session."""
        self.records.append(record)
        numbers = [
            str(len(self.records)),
            _count(record.prompt_tokens),
            _count(record.cached_tokens),
            _count(record.extend_tokens),
            _count(record.completion_tokens),
            "-" if record.ttft_s is None else f"{record.ttft_s * 1000:.0f}",
        ]
        if not record.tools:
            self._row([*numbers, "-", f"no call, finish reason {record.finish_reason}"])
        for position, run in enumerate(record.tools):
            shown = numbers if position == 0 else [""] * len(numbers)
            self._row([*shown, one_line(run.call.name or "-", _TOOL_WIDTH), _result(run)])

    def totals(self, seconds: float) -> None:
        """Print sums over all steps and the share of prompt tokens that came from the cache."""
        records = self.records
        prompt = sum(record.prompt_tokens or 0 for record in records)
        cached = sum(record.cached_tokens or 0 for record in records)
        output = sum(record.completion_tokens or 0 for record in records)
        calls = [run for record in records for run in record.tools]
        share = f"{cached / prompt:.1%}" if prompt else "-"
        self._row([f"{len(records)}", str(prompt), str(cached), str(prompt - cached), str(output)], style="bold")
        failed = sum(not run.result.ok for run in calls)
        self.console.print(
            f"{len(records)} steps in {seconds:.1f} s; {share} of {prompt} prompt tokens came from the cache; "
            f"{len(calls)} tool calls, {failed} of them failed",
            markup=False,
            highlight=False,
        )

    def _row(self, cells: list[str], *, style: str = "") -> None:
        grid = Table.grid(padding=(0, 1))
        for _, width in _COLUMNS:
            grid.add_column(width=width, justify="right", no_wrap=True)
        grid.add_column(width=_TOOL_WIDTH, no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        # Tool results are not ours: what looks like rich markup in them must stay text.
        from_text = [_plain(cell) for cell in cells]
        grid.add_row(*from_text, style=style)
        self.console.print(grid, highlight=False)


def _plain(cell: str) -> str:
    visible = "".join(char if char.isprintable() else "?" for char in cell)
    return visible.replace("[", "\\[")


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _result(run: ToolRun) -> str:
    text = one_line(run.result.user)
    return text if run.result.failure is None else f"{run.result.failure}: {text}"
