"""K3's tokenizer in the shape SGLang's processes expect, so that no code from a checkpoint directory is ever run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from k3_sglang.chat.tokenizer import VOCABULARY_FILE, K3Tokenizer


class EngineTokenizer:
    """The few methods SGLang calls on a tokenizer, over :class:`K3Tokenizer`.

    Text given to :meth:`encode` is data: it never becomes a control token. The gateway talks to the engine in ids, so
    the engine itself uses this for grammars, stop ids and the text it returns beside the ids.
    """

    is_fast = False
    chat_template: str | None = None
    additional_stop_token_ids: set[int] | None = None

    def __init__(self, tokenizer: K3Tokenizer, name: str) -> None:
        self.k3 = tokenizer
        self.name_or_path = name
        special = tokenizer.special
        self.bos_token_id = special.bos
        self.eos_token_id = special.end_of_msg
        self.pad_token_id = special.pad
        self.unk_token_id = special.unk
        self.vocab_size = tokenizer.vocab_size
        self.all_special_ids = list(range(tokenizer.base_tokens, tokenizer.vocab_size))
        self.all_special_ids_set = frozenset(self.all_special_ids)

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Ids of ordinary text; K3 prepends nothing, so ``add_special_tokens`` changes nothing."""
        return self.k3.encode_text(text)

    def __call__(self, text: str | Sequence[str], **_: Any) -> dict[str, Any]:
        """Ids of one text or of several, under ``input_ids``."""
        if isinstance(text, str):
            return {"input_ids": self.encode(text)}
        return {"input_ids": [self.encode(one) for one in text]}

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Text of ids; incomplete characters become U+FFFD, ids outside the vocabulary are left out."""
        sequence = [ids] if isinstance(ids, int) else [int(i) for i in ids]
        kept = [i for i in sequence if 0 <= i < (self.k3.base_tokens if skip_special_tokens else self.vocab_size)]
        return self.k3.decode(kept)

    def batch_decode(self, batch: Sequence[Any], skip_special_tokens: bool = False, **_: Any) -> list[str]:
        """:meth:`decode` of each item."""
        return [self.decode(ids, skip_special_tokens) for ids in batch]

    def num_special_tokens_to_add(self, *_: Any, **__: Any) -> int:
        """Tokens added around a text: none."""
        return 0

    def get_vocab(self) -> dict[str, int]:
        """Spelling to id (pieces that are not UTF-8 are shown with replacement characters and may collide)."""
        return {self.k3.decode([i]): i for i in range(self.vocab_size)}

    def get_added_vocab(self) -> dict[str, int]:
        """Control tokens by their spelling."""
        return self.k3.special_ids_by_spelling

    def convert_tokens_to_ids(self, token: str) -> int:
        """Id of a control token's spelling, else of a text that is one piece, else the unknown id."""
        known = self.k3.special_ids_by_spelling.get(token)
        if known is not None:
            return known
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else self.unk_token_id

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        tokenize: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        reasoning_effort: str | None = None,
        **_: Any,
    ) -> list[int] | str:
        """K3's prompt for OpenAI-shaped messages, for requests that reach SGLang's own chat endpoint."""
        from k3_sglang.chat.encode import encode
        from k3_sglang.chat.request import parse_request

        body: dict[str, Any] = {"messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        if reasoning_effort is not None:
            body["reasoning_effort"] = reasoning_effort
        ids = list(encode(parse_request(body), self.k3).ids)
        return ids if tokenize else self.decode(ids)

    def init_xgrammar(self) -> tuple[Any, list[int]]:
        """Vocabulary for the grammar engine: control tokens are reachable by id only, never by their spelling."""
        from xgrammar import TokenizerInfo, VocabType

        stop = [self.eos_token_id]
        info = TokenizerInfo(
            self.k3.grammar_vocabulary(),
            vocab_type=VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=stop,
            add_prefix_space=False,
        )
        return info, stop


def get_tokenizer_hook(original: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's ``get_tokenizer``: ours for a directory in K3's format, upstream's for anything else."""
    if is_k3_directory(name):
        return EngineTokenizer(K3Tokenizer.from_dir(name), name)
    return original(name, *args, **kwargs)


def is_k3_directory(name: str) -> bool:
    """Whether a checkpoint has its vocabulary in K3's format, so that this tokenizer serves it."""
    directory = Path(name)
    return (directory / VOCABULARY_FILE).is_file() and not (directory / "tokenizer.json").exists()
