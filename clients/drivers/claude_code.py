"""Claude Code, headless: a question, and another one in the same conversation. Its tools are those that only read."""

from __future__ import annotations

import cli

VARIABLES = {
    "ANTHROPIC_BASE_URL": cli.URL,
    "ANTHROPIC_API_KEY": "unused",
    "ANTHROPIC_MODEL": cli.MODEL,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": cli.MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
}
TURNS_ARE_OVER = '"subtype":"error_max_turns"'
"""Untrained weights may call tools for ever; then the limit below ends it."""
FLAGS = ("--output-format", "json", "--tools", "Read,Glob", "--max-turns", "5")


def main():
    """Two runs of the program; the second continues the first."""
    cli.run("claude", "-p", cli.FIRST, *FLAGS, also_ends_with=TURNS_ARE_OVER, **VARIABLES)
    cli.run("claude", "-c", "-p", cli.SECOND, *FLAGS, also_ends_with=TURNS_ARE_OVER, **VARIABLES)
    cli.report()


main()
