"""Write the tiny K3 to a directory, or to a per-user cache once and for all. Imports torch only when it builds."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k3_sglang.tiny.recipe import CONFIG, GENERATION_CONFIG, PREPROCESSOR_CONFIG, TOKENIZER_CONFIG, Files
from k3_sglang.vision.config import PREPROCESSOR_FILE

if TYPE_CHECKING:
    from torch import Tensor

CACHE_VARIABLE: Final = "K3_SGLANG_CACHE"
"""Variable that names the cache directory; default ``$XDG_CACHE_HOME/k3_sglang``, then ``~/.cache/k3_sglang``."""

VOCABULARY: Final = Path(__file__).parent / "vocab" / "tiktoken.model"

_SHARDS: Final = 3
"""Layer 0 lies in the first shard and layer 1 in the second, as in the release."""


def build(directory: str | Path, seed: int = 0, *, force: bool = False) -> Path:
    """Write a tiny K3 in the release's layout; one seed always gives the same bytes.

    Args:
        directory: created when missing.
        seed: any integer; another seed gives other weights.
        force: allow a directory that is not empty. Files of an earlier checkpoint are replaced, others stay.

    Returns:
        The directory.

    Raises:
        FileExistsError: the directory is not empty and ``force`` is off.
        NotADirectoryError: the path is a file.
    """
    from k3_sglang.tiny.weights import tensors

    target = prepare(directory, force=force)
    write(target, tensors(seed), Files(CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG), VOCABULARY)
    return target


def prepare(directory: str | Path, *, force: bool) -> Path:
    """Make a directory ready to receive a checkpoint; errors as in :func:`build`."""
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; give a directory to write the checkpoint to")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise FileExistsError(f"{target} is not empty; choose another directory or pass --force to overwrite")
    target.mkdir(parents=True, exist_ok=True)
    for stale in target.glob("model-*-of-*.safetensors"):
        stale.unlink()
    return target


def write(target: Path, tensors: Iterable[tuple[str, Tensor]], files: Files, vocabulary: Path) -> None:
    """Write a checkpoint's files: shards and index, vocabulary, configuration."""
    _write_shards(target, tensors, int(files.config["text_config"]["num_hidden_layers"]))
    shutil.copyfile(vocabulary, target / "tiktoken.model")
    _write_json(target / "tokenizer_config.json", files.tokenizer_config)
    _write_json(target / "generation_config.json", files.generation_config)
    _write_json(target / PREPROCESSOR_FILE, PREPROCESSOR_CONFIG)
    _write_json(target / "config.json", files.config)


def ensure(cache_dir: str | Path | None = None, seed: int = 0) -> Path:
    """Directory of the tiny K3 in a cache, built when it is not there yet.

    The directory's name contains a hash of everything the result depends on, so a changed recipe never meets an old
    build. It appears complete or not at all, also when several processes ask at once.

    Args:
        cache_dir: default: see :data:`CACHE_VARIABLE`.
        seed: as in :func:`build`.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    target = cache / f"tiny-{recipe_hash()}-seed{seed}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache))
    try:
        staging.chmod(0o755)
        build(staging, seed)
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, with the same bytes
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def default_cache_dir() -> Path:
    """Where :func:`ensure` builds when it is not told otherwise."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "k3_sglang"


def recipe_hash() -> str:
    """12 hex digits over the sources and the vocabulary a build depends on."""
    here = Path(__file__).parent
    sources = [here / "recipe.py", here / "weights.py", here / "checkpoint.py", VOCABULARY]
    sources.append(here.parent / "kernels" / "mxfp4.py")
    digest = hashlib.sha256()
    for source in sources:
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_shards(target: Path, tensors: Iterable[tuple[str, Tensor]], layers: int) -> None:
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{} for _ in range(_SHARDS)]
    for name, tensor in tensors:
        shards[_shard_of(name, layers)][name] = tensor
    weight_map: dict[str, str] = {}
    total_size = 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{_SHARDS:06d}.safetensors"
        save_file(shard, target / file, metadata={"format": "pt"})
        (target / file).chmod(0o644)  # safetensors makes it private
        weight_map |= dict.fromkeys(shard, file)
        total_size += sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(target / "model.safetensors.index.json", index)


def _shard_of(name: str, layers: int) -> int:
    """0-based shard of a tensor: embedding and layer 0, half of the others, the rest with head and image tower."""
    if ".layers." not in name:
        return 0 if "embed_tokens" in name else _SHARDS - 1
    layer = int(name.split(".layers.")[1].split(".")[0])
    return 0 if layer == 0 else (1 if layer <= layers // 2 else 2)
