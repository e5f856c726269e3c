"""Trainer of the tiny model's vocabulary: byte-level BPE under K3's pre-tokenisation.

``vocab/tiktoken.model`` is its shipped result; a build never retrains, because the corpus (the running Python's own
sources and language reference) differs between Python versions. Regenerate with

    python -m k3_sglang.tiny.vocabulary OUT

Needs the ``regex`` package, which tiktoken brings along.
"""

from __future__ import annotations

import base64
import heapq
import importlib
import importlib.util
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

BASE_TOKENS: Final = 1792
"""Byte pieces: 256 single bytes and the merges; with 256 control tokens the vocabulary has 2,048."""

_MODULES: Final = (
    *("argparse", "ast", "asyncio.base_events", "asyncio.tasks", "collections", "configparser", "contextlib", "csv"),
    *("dataclasses", "datetime", "decimal", "difflib", "doctest", "email.message", "enum", "fractions", "functools"),
    *("heapq", "http.client", "inspect", "json.decoder", "json.encoder", "logging", "pathlib", "pdb"),
    *("random", "shutil", "socket", "statistics", "string", "subprocess", "tempfile", "textwrap", "threading"),
    *("tokenize", "traceback", "typing", "unittest.case", "urllib.parse", "uuid", "zipfile"),
)

_FILES: Final = ("src/app.py", "README.md", "tests/test_app.py", "pyproject.toml", "docs/index.md", "Makefile")
_TOOLS: Final = {
    "read_file": ("Read a text file in the working directory.", ("path", "start_line", "end_line")),
    "write_file": ("Write a text file in the working directory.", ("path", "content")),
    "list_files": ("List the files of a folder.", ("path", "pattern")),
    "search": ("Search all files for a regular expression.", ("pattern", "path", "max_results")),
    "run_shell": ("Run a shell command and return its output and exit code.", ("command", "timeout_s")),
    "get_weather": ("Current weather at a location.", ("location", "unit")),
}


def train(texts: Iterable[str], base_tokens: int = BASE_TOKENS) -> list[bytes]:
    """Learn byte pieces by merging the most frequent neighbouring pair again and again.

    Ties go to the pair whose bytes come first, so the result depends on nothing but the texts.

    Args:
        texts: the corpus.
        base_tokens: pieces wanted, the 256 single bytes included.

    Returns:
        Pieces in rank order: the single bytes 0 to 255, then merges.

    Raises:
        ValueError: the corpus has too few distinct pairs for that many pieces.
    """
    words = word_counts(texts)
    spelled = [[bytes((byte,)) for byte in word] for word in words]
    counts = list(words.values())
    pairs: Counter[tuple[bytes, bytes]] = Counter()
    where: defaultdict[tuple[bytes, bytes], set[int]] = defaultdict(set)
    for index, word in enumerate(spelled):
        for pair in zip(word, word[1:], strict=False):
            pairs[pair] += counts[index]
            where[pair].add(index)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    pieces = [bytes((byte,)) for byte in range(256)]
    known = set(pieces)
    while len(pieces) < base_tokens:
        if not heap:
            raise ValueError(f"the corpus yields only {len(pieces)} pieces, {base_tokens} are wanted; give more text")
        count, pair = heapq.heappop(heap)
        if pairs[pair] != -count or count == 0:
            continue  # an outdated entry: the pair was pushed again when its count changed
        changed = _merge(pair, spelled, counts, pairs, where)
        for other in changed:
            heapq.heappush(heap, (-pairs[other], other))
        if pair[0] + pair[1] not in known:  # two splits can spell the same piece
            known.add(pair[0] + pair[1])
            pieces.append(pair[0] + pair[1])
    return pieces


def word_counts(texts: Iterable[str]) -> dict[bytes, int]:
    """How often each pre-token of K3's pattern occurs, in byte order of the pre-tokens."""
    regex = importlib.import_module("regex")
    from k3_sglang.chat.tokenizer import PATTERN

    splitter = regex.compile(PATTERN, regex.VERSION1)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(splitter.findall(text))
    return {word.encode(): counts[word] for word in sorted(counts)}


def _merge(
    pair: tuple[bytes, bytes],
    spelled: list[list[bytes]],
    counts: list[int],
    pairs: Counter[tuple[bytes, bytes]],
    where: defaultdict[tuple[bytes, bytes], set[int]],
) -> set[tuple[bytes, bytes]]:
    """Replace a pair by its union in every word that has it; returns the pairs whose counts changed."""
    changed: set[tuple[bytes, bytes]] = set()
    for index in where.pop(pair):
        word, count = spelled[index], counts[index]
        for old in zip(word, word[1:], strict=False):
            pairs[old] -= count
            changed.add(old)
        merged: list[bytes] = []
        at = 0
        while at < len(word):
            if at + 1 < len(word) and (word[at], word[at + 1]) == pair:
                merged.append(pair[0] + pair[1])
                at += 2
            else:
                merged.append(word[at])
                at += 1
        spelled[index] = merged
        for new in zip(merged, merged[1:], strict=False):
            pairs[new] += count
            changed.add(new)
            where[new].add(index)
    return changed - {pair}


def dump(pieces: list[bytes]) -> bytes:
    """The release's vocabulary file format: one ``base64 rank`` line per piece."""
    return b"".join(base64.b64encode(piece) + f" {rank}\n".encode() for rank, piece in enumerate(pieces))


def corpus() -> Iterator[str]:
    """English, Python, JSON and K3's prompt format, from the standard library of the running Python and from here."""
    topics = importlib.import_module("pydoc_data.topics").topics
    yield from (topics[name] for name in sorted(topics))
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"the corpus needs the source of the standard module {name!r}; it is not there")
        yield Path(spec.origin).read_text(encoding="utf-8")
    for _ in range(20):  # the sources above are much longer
        yield from _prompts()


def _prompts() -> Iterator[str]:
    schemas = [
        {
            "function": {
                "description": description,
                "name": name,
                "parameters": {
                    "additionalProperties": False,
                    "properties": {argument: {"description": argument, "type": "string"} for argument in arguments},
                    "required": list(arguments),
                    "type": "object",
                },
            },
            "type": "function",
        }
        for name, (description, arguments) in _TOOLS.items()
    ]
    yield "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
    yield json.dumps(schemas, separators=(",", ":"))
    yield json.dumps(schemas, indent=2)
    for level in ("low", "medium", "high", "max"):
        yield f"Now the system is invoked with `thinking_effort={level}`. `{level}`"
    for name, (description, arguments) in _TOOLS.items():
        yield f"{description} I will call {name} and look at what it returns."
        for file in _FILES:
            yield from ("message", ' role="assistant"', "think", "response", "tools", f'call tool="{name}" index="1"')
            yield from (f'argument key="{key}" type="string"' for key in arguments)
            yield json.dumps({"path": file, "exit_code": 0, "output": f"{file}: 3 passed, 0 failed"})


def main(arguments: list[str]) -> int:
    """Train on :func:`corpus` and write the file named on the command line."""
    if len(arguments) != 1:
        print("usage: python -m k3_sglang.tiny.vocabulary OUT", file=sys.stderr)
        return 2
    Path(arguments[0]).write_bytes(dump(train(corpus())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
