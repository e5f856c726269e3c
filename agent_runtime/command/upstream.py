"""`serve --upstream`: the gateway before another K3 server, set up from the command line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from agent_runtime.upstream.profiles import PROFILES

WINDOW = 1_048_576


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line, beside that of an agent."""
    group = parser.add_argument_group("the gateway before another K3 server, in place of an agent")
    group.add_argument("--upstream", metavar="URL", help="its base URL, /v1 included")
    group.add_argument("--profile", choices=sorted(PROFILES), default="generic", help="what it is (%(default)s)")
    group.add_argument("--upstream-model", help="the model's name there; default: that of --model")
    key = group.add_mutually_exclusive_group()
    key.add_argument("--upstream-key-env", metavar="NAME", help="variable with its key")
    key.add_argument("--upstream-key-file", type=Path, metavar="FILE", help="file with its key")
    access = group.add_mutually_exclusive_group()
    access.add_argument("--api-keys-file", type=Path, metavar="FILE", help="keys that may use it, `name:key` a line")
    access.add_argument("--api-keys-env", metavar="NAME", help="variable with such lines, or separated by commas")
    access.add_argument("--allow-no-keys", action="store_true", help="listen without keys where others reach it")
    group.add_argument("--guard", choices=("repair", "strict", "off"), default="repair", help="(%(default)s)")
    group.add_argument("--ledger", type=Path, help="file that keeps every request and answer")


def settings(options: argparse.Namespace) -> dict[str, object]:
    """The gateway's settings file."""
    given = {
        "model": options.model or "kimi-k3",
        "context_len": options.window or WINDOW,
        "host": options.host,
        "port": options.port,
        "api_keys_file": options.api_keys_file,
        "api_keys_env": options.api_keys_env,
        "allow_no_keys": options.allow_no_keys,
        "upstream": "openai",
        "upstream_url": options.upstream,
        "upstream_profile": options.profile,
        "upstream_model": options.upstream_model,
        "upstream_key_env": options.upstream_key_env,
        "upstream_key_file": options.upstream_key_file,
        "tokenizer_dir": options.tokenizer,
        "guard": options.guard,
        "ledger": options.ledger,
    }
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return {name: value for name, value in plain.items() if value is not None}


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted, as a process of the gateway's own; its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gateway.json"
        file.write_text(json.dumps(settings(options)), "utf-8")
        print(f"gateway on http://{options.host}:{options.port} before {options.upstream}", flush=True)
        with subprocess.Popen([sys.executable, "-m", "agent_runtime.gateway", "--settings", str(file)]) as process:
            try:
                return process.wait()
            except KeyboardInterrupt:
                return process.wait()  # the terminal has interrupted it too
            finally:
                if process.poll() is None:
                    process.terminate()
