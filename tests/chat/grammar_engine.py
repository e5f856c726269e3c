"""What SGLang does with a grammar, in small: a compiler, a matcher per request, masks of what is allowed."""

import random
from typing import Any

import pytest

from k3_sglang.chat.grammar import constraint
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, Segment

xgrammar = pytest.importorskip("xgrammar", reason="xgrammar comes with the serve extra")
numpy = pytest.importorskip("numpy", reason="numpy comes with the serve extra")


class Engine:
    """What SGLang does with a constraint: one compiler for all requests, a matcher per request."""

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self.tokenizer = tokenizer
        info = xgrammar.TokenizerInfo(
            tokenizer.grammar_vocabulary(),
            xgrammar.VocabType.RAW,
            vocab_size=tokenizer.vocab_size,
            stop_token_ids=[tokenizer.special.end_of_msg],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=2)
        self._mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)

    def matcher(self, request: dict[str, Any] | ChatRequest, *, force: bool = False) -> Any:
        parsed = request if isinstance(request, ChatRequest) else parse_request(request)
        found = constraint(parsed, parsed.start, force=force)
        assert found is not None
        return xgrammar.GrammarMatcher(self._compiler.compile_structural_tag(found["structural_tag"]))

    def matcher_of(self, ebnf: str) -> Any:
        return xgrammar.GrammarMatcher(self._compiler.compile_grammar(ebnf))

    def accepts(self, matcher: Any, text: str) -> bool:
        """Whether the text, its marker spellings as control tokens, is one whole turn."""
        ids = self.tokenizer.encode_segments([Segment(text, True)])
        return all(matcher.accept_token(token) for token in ids) and matcher.is_terminated()

    def fill(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self._mask, 0)

    def allowed(self, matcher: Any) -> list[int]:
        self.fill(matcher)
        bits = numpy.unpackbits(self._mask[0].numpy().view(numpy.uint8), bitorder="little")
        return [int(token) for token in numpy.nonzero(bits)[0] if token < self.tokenizer.vocab_size]

    def walk(self, matcher: Any, drawn: random.Random, *, limit: int) -> list[int]:
        """Ids drawn uniformly from what the grammar allows: a model without any training."""
        ids: list[int] = []
        while not matcher.is_terminated():
            ids.append(drawn.choice(self.allowed(matcher)))
            assert matcher.accept_token(ids[-1])
            assert len(ids) <= limit, self.tokenizer.decode(ids)
        return ids
