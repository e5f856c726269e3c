"""Kimi Code, headless, in one of its provider types: a question, and another one in the same session.

With ``-p`` it runs every tool that the model calls, its shell too, without asking; here that is in a scratch folder.
"""

from __future__ import annotations

import sys

import cli

BASES = {"kimi": f"{cli.URL}/v1", "openai": f"{cli.URL}/v1", "anthropic": cli.URL}
CONFIG = """
default_model = "k3"
telemetry = false

[providers.local]
type = "{kind}"
base_url = "{base}"
api_key = "unused"

[models.k3]
provider = "local"
model = "{model}"
max_context_size = {context}
capabilities = ["thinking", "always_thinking", "tool_use"]
support_efforts = ["low", "high", "max"]
default_effort = "max"
"""


def main():
    """Two runs of the program; the second continues the first."""
    home = cli.HOME / "kimi"
    home.mkdir()
    kind = sys.argv[1]
    text = CONFIG.format(kind=kind, base=BASES[kind], model=cli.MODEL, context=cli.CONTEXT_TOKENS)
    (home / "config.toml").write_text(text, encoding="utf-8")
    variables = {"KIMI_CODE_HOME": str(home), "KIMI_DISABLE_TELEMETRY": "1", "KIMI_CODE_NO_AUTO_UPDATE": "1"}
    cli.run("kimi", "-p", cli.FIRST, "--output-format", "stream-json", **variables)
    cli.run("kimi", "-c", "-p", cli.SECOND, "--output-format", "stream-json", **variables)
    cli.report()


main()
