"""A checkpoint folder: configuration, vocabulary, index, files against their headers, hashes where a list is there."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

from k3_sglang.chat.errors import VocabularyError
from k3_sglang.chat.tokenizer import CONFIG_FILE, VOCABULARY_FILE, K3Tokenizer
from k3_sglang.chat.vocabulary import read_specials
from k3_sglang.config import ConfigError, K3Config
from k3_sglang.launch.doctor.findings import Finding, blocks, note, ok
from k3_sglang.launch.planner.pools import gib
from k3_sglang.loading.headers import INDEX_FILE, HeaderError, checkpoint_problems, read_header
from k3_sglang.vision.support import why_text_only

HASH_FILES: Final = ("SHA256SUMS", "SHA256SUMS.txt", "sha256sum.txt", "sha256.txt", "checksums.sha256")
"""Names of lists in the form of ``sha256sum``: hash, space, file."""

RELEASE_VOCABULARY_SHA256: Final = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"
"""Of the release's ``tiktoken.model``, 2,795,286 bytes."""
RELEASE_VOCAB_SIZE: Final = 163_840

AGAIN: Final = "download it again"
READ_BYTES: Final = 1 << 24
SHOWN: Final = 3

_LINE = re.compile(r"^([0-9a-fA-F]{64}) [ *](.+)$")


def look(directory: Path, *, hashes: bool = True, progress: Callable[[str], None] = lambda text: None) -> list[Finding]:
    """All findings about a checkpoint.

    Args:
        hashes: whether files are read whole and compared, if a list of hashes is there.
        progress: told of each file that is read whole.
    """
    try:
        config = K3Config.from_dir(directory)
    except ConfigError as error:
        return [blocks("checkpoint", str(error), "give the folder that holds the config.json of a K3 checkpoint")]
    found = [*tokenizer(directory, config), *index(directory), *weights(directory)]
    listed = next((directory / name for name in HASH_FILES if (directory / name).is_file()), None)
    if listed is None:
        fix = "make one with `sha256sum *` where the download is known to be whole; the doctor compares with it"
        found.append(note("hashes", f"no list of hashes ({', '.join(HASH_FILES)})", fix))
    elif hashes:
        found += compare_hashes(listed, progress)
    return found


def tokenizer(directory: Path, config: K3Config) -> list[Finding]:
    """The vocabulary is K3's, as large as the model's, and agrees with the configuration about control tokens."""
    path = directory / VOCABULARY_FILE
    try:
        made = K3Tokenizer.from_dir(directory)
    except (VocabularyError, OSError) as error:
        return [blocks("tokenizer", str(error), f"download {VOCABULARY_FILE} and tokenizer_config.json again")]
    found: list[Finding] = []
    fix = f"take {VOCABULARY_FILE} and tokenizer_config.json from the folder that config.json is from"
    specials = directory / CONFIG_FILE
    first = min(read_specials(specials), default=made.base_tokens) if specials.is_file() else made.base_tokens
    if made.base_tokens != first:
        text = f"{VOCABULARY_FILE} has {made.base_tokens} tokens, but control tokens begin at {first}: it is cut off"
        found.append(blocks("tokenizer", text, AGAIN))
    if made.vocab_size > config.text.vocab_size:
        text = f"the tokenizer has {made.vocab_size} tokens, the model {config.text.vocab_size}"
        found.append(blocks("tokenizer", text, fix))
    if made.special.end_of_msg != config.eos_token_id:
        text = f"<|end_of_msg|> is token {made.special.end_of_msg}, but config.json ends at {config.eos_token_id}"
        found.append(blocks("tokenizer", text, fix))
    if config.text.vocab_size == RELEASE_VOCAB_SIZE and sha256(path) != RELEASE_VOCABULARY_SHA256:
        text = f"{path} is not the release's vocabulary, though the model is as large as the release"
        found.append(blocks("tokenizer", text, f"download {VOCABULARY_FILE} again"))
    return found or [ok("tokenizer", f"{made.vocab_size} tokens, ends of messages as in config.json")]


def index(directory: Path) -> list[Finding]:
    """Every tensor lies in the file that the index names for it, and every file's tensors are in the index."""
    path = directory / INDEX_FILE
    if not path.is_file():
        return []
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        places = cast("dict[str, str]", raw["weight_map"])
        by_file: dict[str, set[str]] = {}
        for tensor, file in places.items():
            by_file.setdefault(file, set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [blocks("index", f"{path} cannot be read ({error!r})", AGAIN)]
    found: list[Finding] = []
    for file, wanted in sorted(by_file.items()):
        try:
            held = set(read_header(directory / file))
        except HeaderError:
            continue  # told with the weights
        if not_there := sorted(wanted - held):
            text = f"{INDEX_FILE} names {_listed(not_there)} in {file}, which does not hold them"
            found.append(blocks("index", text, f"{AGAIN}: {INDEX_FILE} and {file} are of different downloads"))
        if not_named := sorted(held - wanted):
            text = f"{file} holds {_listed(not_named)}, which {INDEX_FILE} does not name there"
            found.append(blocks("index", text, f"{AGAIN}: {INDEX_FILE} and {file} are of different downloads"))
    return found or [ok("index", f"{len(places)} tensors in {len(by_file)} files")]


def weights(directory: Path) -> list[Finding]:
    """Files are there, as long as their headers say, and hold what config.json describes; only headers are read."""
    problems = checkpoint_problems(directory, images=why_text_only(directory) is None)
    if problems:
        return [blocks("weights", *_split(line)) for line in problems]
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return [
        ok("weights", f"{gib(size)} in files that are as long as their headers say, with every tensor of the model")
    ]


def compare_hashes(listed: Path, progress: Callable[[str], None]) -> list[Finding]:
    """Files against a list of hashes; they are read whole, which takes as long as loading does."""
    try:
        entries = list(_entries(listed))
    except (OSError, ValueError) as error:
        return [blocks("hashes", f"{listed} cannot be read: {error}", "write it with `sha256sum`, or take it away")]
    found: list[Finding] = []
    for wanted, name in entries:
        path = listed.parent / name
        if not path.is_file():
            found.append(blocks("hashes", f"{listed.name} names {name}, which is not there", AGAIN))
            continue
        progress(f"reading {name}")
        if sha256(path) != wanted:
            found.append(blocks("hashes", f"{name} has other bytes than {listed.name} says", AGAIN))
    named = {Path(name) for _, name in entries}
    left = sorted(path.name for path in listed.parent.glob("*.safetensors") if Path(path.name) not in named)
    if left:
        text = f"{listed.name} names {_listed(left)} not, so nothing was compared there"
        fix = "make the list again with `sha256sum *` where the download is known to be whole"
        found.append(note("hashes", text, fix))
    return found or [ok("hashes", f"{len(entries)} files as {listed.name} says")]


def sha256(path: Path) -> str:
    """Hash of a file's bytes, in hexadecimal."""
    made = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            made.update(block)
    return made.hexdigest()


def _entries(listed: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(listed.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        match: re.Match[str] | Any = _LINE.match(line)
        if match is None:
            raise ValueError(f"line {number} is not a hash and a file name")
        yield match[1].lower(), match[2]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _split(line: str) -> tuple[str, str]:
    for mark in ("; ", ": "):
        text, found, fix = line.rpartition(mark)
        if found and "download" in fix:
            return text, fix
    return line, "use weight files and config.json of the same download"
