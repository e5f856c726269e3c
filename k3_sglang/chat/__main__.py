"""Shows what K3 sees and says: `python -m k3_sglang.chat render|tokens|parse`."""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3_sglang.chat.encode import encode, render
from k3_sglang.chat.errors import ChatRequestError, VocabularyError
from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.parse import TurnParser
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, ImagePart, Segment
from k3_sglang.vision.images import ImageError, data_url_bytes, load_image


class InputError(ValueError):
    """Input that the command cannot use."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2 for input that is refused)."""
    options = _parser().parse_args(arguments)
    try:
        for line in {"render": _render, "tokens": _tokens, "parse": _parse}[options.command](options):
            _print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has what it wanted; nothing is left to be written when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except RecursionError:
        print("error: the input is nested too deeply; flatten it", file=sys.stderr)
        return 2
    except (ChatRequestError, VocabularyError, InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _print(line: str) -> None:
    """Print a line, escaping what the output's encoding cannot say (half of a surrogate pair in UTF-8)."""
    encoding = sys.stdout.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m k3_sglang.chat", description="See exactly what K3 sees.")
    commands = parser.add_subparsers(dest="command", required=True)
    render_ = commands.add_parser("render", help="print a request's prompt as text or segments")
    render_.add_argument("--segments", action="store_true", help="one segment a line: control or text, and its text")
    tokens = commands.add_parser("tokens", help="print a request's token ids or their counts")
    tokens.add_argument("--counts", action="store_true", help="print counts instead of ids")
    parse = commands.add_parser("parse", help="print the message that output ids or output text stand for")
    parse.add_argument("--start", choices=("think", "response"), default="think", help="channel the prompt left open")
    parse.add_argument("--text", action="store_true", help="the input is output text; marker spellings are markers")
    parse.add_argument("--reason", choices=("stop", "length", "abort"), default="stop", help="why generation ended")
    for command in (render_, tokens):
        command.add_argument("--lenient", action="store_true", help="accept what the released encoder accepts")
    for command in (tokens, parse):
        command.add_argument("--vocabulary", type=Path, help="checkpoint directory with tiktoken.model")
    for command in (render_, tokens, parse):
        command.add_argument("file", nargs="?", default="-", help="input file; standard input if absent")
    return parser


def _render(options: argparse.Namespace) -> Iterable[str]:
    segments = render(_request(options))
    if not options.segments:
        return ["".join(segment.text for segment in segments)]
    return [_segment_line(segment) for segment in segments]


def _segment_line(segment: Segment) -> str:
    kind = "control" if segment.allow_special else "text"
    return f"{kind:8}{json.dumps(segment.text, ensure_ascii=False)}"


def _tokens(options: argparse.Namespace) -> Iterable[str]:
    tokenizer = _tokenizer(options)
    prompt = encode(_request(options), tokenizer)
    if not options.counts:
        return [json.dumps(prompt.ids)]
    control = sum(map(tokenizer.is_special, prompt.ids))
    return [f"prompt {len(prompt.ids)}", f"control {control}", f"text {len(prompt.ids) - control}"]


def _parse(options: argparse.Namespace) -> Iterable[str]:
    text = _read(options)
    if options.text:
        parser = TurnParser(None, start=options.start)
        parser.feed_text(text)
    else:
        parser = TurnParser(_tokenizer(options), start=options.start)
        try:
            parser.feed(_ids(text))
        except ValueError as error:
            raise InputError(str(error)) from None
    parser.finish(options.reason)
    return [json.dumps(asdict(parser.turn), ensure_ascii=False, indent=2)]


def _tokenizer(options: argparse.Namespace) -> K3Tokenizer:
    if options.vocabulary is None:
        raise InputError("--vocabulary is missing; name the checkpoint directory that holds tiktoken.model")
    return K3Tokenizer.from_dir(options.vocabulary)


def _request(options: argparse.Namespace) -> ChatRequest:
    body = _json(_read(options))
    if not is_object(body):
        raise InputError("the input is not a JSON object; give the body of a chat completion request")
    return parse_request(body, lenient=options.lenient, images=None if options.lenient else _data_url_image)


def _data_url_image(source: str, param: str) -> ImagePart:
    """Nothing is fetched here: an image is shown as far as the request itself holds it."""
    try:
        data = data_url_bytes(source)
        return ImagePart(source, load_image(data).size, hashlib.sha256(data).digest())
    except ImageError as error:
        raise ChatRequestError(param, error.code, str(error)) from error


def _ids(text: str) -> list[int]:
    value = _json(text)
    if not is_list(value) or not all(type(token) is int for token in value):
        raise InputError("the input is not a JSON list of token ids; use --text for text")
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"the input is not JSON: {error}") from None


def _read(options: argparse.Namespace) -> str:
    data = sys.stdin.buffer.read() if options.file == "-" else Path(options.file).read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"the input is not UTF-8: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
