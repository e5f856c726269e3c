"""Runs the gateway: ``python -m agent_runtime.gateway --settings FILE.json``."""

import argparse
import logging
import sys
from pathlib import Path

from starlette.applications import Starlette

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.errors import LedgerError, SettingsError
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.foreign import ForeignServer
from agent_runtime.gateway.keys import read_keys, readable_by_others
from agent_runtime.gateway.operations import logs, server
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.errors import VocabularyError
from k3_sglang.chat.tokenizer import K3Tokenizer

logger = logging.getLogger(__name__)

USAGE_ERROR = 2


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns 0 after a requested stop, 2 when the settings cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        settings = GatewaySettings.from_file(options.settings)
        if options.check:
            read_keys(settings)
            return 0
        app = app_of(settings)
    except (SettingsError, LedgerError, VocabularyError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return USAGE_ERROR
    serve(app, settings, options.log_level)
    return 0


def app_of(settings: GatewaySettings) -> Starlette:
    """The application. Raises SettingsError, LedgerError or VocabularyError when it cannot be made."""
    keys = read_keys(settings)
    folder = settings.tokenizer_dir
    tokenizer = None if folder is None else K3Tokenizer.from_dir(folder)
    if settings.upstream == "openai":
        foreign = ForeignServer(settings)
        return create_app(settings, foreign.engine(), tokenizer, foreign, keys)
    return create_app(settings, _engine(settings), tokenizer, keys=keys)


def serve(app: Starlette, settings: GatewaySettings, log_level: str) -> None:
    """Serve until SIGTERM or SIGINT, then end the process with 0."""
    logs.configure(settings.log_format, log_level)
    if settings.api_keys_file is not None and readable_by_others(settings.api_keys_file):
        logger.warning("everybody on this machine can read api_keys_file %s; chmod 600 it", settings.api_keys_file)
    server.serve(app, app.state.drain, settings)


def _engine(settings: GatewaySettings) -> SGLangEngine:
    return SGLangEngine(
        settings.engine_url,
        connect_timeout_s=settings.engine_connect_timeout_s,
        idle_timeout_s=settings.engine_idle_timeout_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agent_runtime.gateway",
        description="OpenAI-compatible server for Kimi K3, before an SGLang engine's /generate or another K3 server.",
        epilog="Keys of the settings file: " + ", ".join(GatewaySettings.model_fields) + ".",
    )
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE.json", help="settings as JSON")
    parser.add_argument("--check", action="store_true", help="say whether settings and keys can be used, and stop")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default: info"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
