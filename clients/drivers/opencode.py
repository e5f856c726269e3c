"""opencode, headless: a question, and another one in the same session. It may read and look for files, nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import cli

CONFIG = {
    "$schema": "https://opencode.ai/config.json",
    "autoupdate": False,
    "share": "disabled",
    "model": f"k3/{cli.MODEL}",
    "small_model": f"k3/{cli.MODEL}",
    "provider": {
        "k3": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "K3",
            "options": {"baseURL": f"{cli.URL}/v1", "apiKey": "unused"},
            "models": {
                cli.MODEL: {
                    "name": "K3",
                    "reasoning": True,
                    "tool_call": True,
                    "limit": {"context": cli.CONTEXT_TOKENS, "output": 4096},
                }
            },
        }
    },
    "permission": {"*": "deny", "read": "allow", "glob": "allow", "grep": "allow"},
}
VARIABLES = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
}


def main():
    """Two runs of the program; the second continues the first."""
    Path("opencode.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    cli.run("opencode", "run", cli.FIRST, **VARIABLES)
    cli.run("opencode", "run", "-c", cli.SECOND, **VARIABLES)
    cli.report()


main()
