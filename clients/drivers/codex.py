"""Codex, headless, with a provider of its own configuration: a question, and another one in the same session."""

from __future__ import annotations

import cli

CONFIG = """
model = "{model}"
model_provider = "k3"
model_context_window = {context}
approval_policy = "never"
sandbox_mode = "read-only"
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.k3]
name = "K3"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "K3_KEY"
request_max_retries = 0
stream_max_retries = 0

[analytics]
enabled = false

[features]
multi_agent = false
"""


def main():
    """Two runs of the program; the second continues the first."""
    home = cli.HOME / "codex"
    home.mkdir()
    text = CONFIG.format(model=cli.MODEL, context=cli.CONTEXT_TOKENS, url=cli.URL)
    (home / "config.toml").write_text(text, encoding="utf-8")
    variables = {"CODEX_HOME": str(home), "K3_KEY": "unused"}
    cli.run("codex", "exec", "--skip-git-repo-check", "--json", cli.FIRST, **variables)
    cli.run("codex", "exec", "resume", "--last", "--skip-git-repo-check", "--json", cli.SECOND, **variables)
    cli.report()


main()
