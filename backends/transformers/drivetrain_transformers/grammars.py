# pyright: reportMissingImports=false
"""Structured output: grammars compiled by xgrammar, and the masks that they put on logits."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import torch
import xgrammar
from xgrammar import CompiledGrammar

from drivetrain.backend.toolkit.daemon_thread import in_daemon_thread
from drivetrain.backend.toolkit.translation import eos_token_ids
from drivetrain.backend.toolkit.xgrammar_limits import refuse_ignored_parts
from drivetrain.errors import DeadlineExceeded, EngineInternalError, InvalidRequest
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.sampling import EbnfGrammar, JsonSchema, RegexGrammar

Grammar = JsonSchema | RegexGrammar | EbnfGrammar

FIELD: Final = "sampling_params.structured_output"
COMPILE_S: Final = 60.0
"""Longest time to compile one grammar, and to wait for others to be compiled."""
_AT_ONCE: Final = 2
_KEPT_BYTES: Final = 128 * 2**20
"""Memory for compiled grammars that no request uses."""
_COMPILE_THREADS: Final = max(1, min(8, (os.cpu_count() or 2) // 2))


class Grammars:
    """Compiles grammars in threads of its own, and keeps recent ones. Used on one event loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = tuple(dict.fromkeys((*eos, *eos_token_ids(tokenizer.inner))))
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._making = threading.Lock()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._nbytes = 0
        self._compiling: dict[Grammar, asyncio.Task[CompiledGrammar]] = {}

    def kept(self, grammar: Grammar) -> CompiledGrammar | None:
        """Return a grammar that was compiled already; None if it was not, or no longer is."""
        found = self._kept.get(grammar)
        if found is not None:
            self._kept.move_to_end(grammar)
        return found

    async def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """Return the compiled grammar, once for all requests that ask for it.

        Raises:
            InvalidRequest: xgrammar cannot compile it, it takes too long, or it describes no text at all.
            DeadlineExceeded: Other grammars are still being compiled.
        """
        found = self.kept(grammar)
        if found is not None:
            return found
        task = self._compiling.get(grammar)
        if task is None:
            task = self._compiling[grammar] = asyncio.create_task(self._compile(grammar))
            task.add_done_callback(lambda _: self._compiling.pop(grammar, None))
        # A cancelled request must not cancel the compilation for the other requests.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Stop waiting for grammars; a thread that compiles one ends by itself."""
        tasks = list(self._compiling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            async with asyncio.timeout(COMPILE_S):
                await self._slots.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{FIELD}: timed out after {COMPILE_S:g} s waiting for {_AT_ONCE} other grammars to be compiled"
            ) from None
        # The thread cannot be ended, so its slot is free only when it has.
        work = in_daemon_thread(lambda: self._compile_now(grammar), "drivetrain-grammar")
        work.add_done_callback(lambda _: self._slots.release())
        done, _ = await asyncio.wait([work], timeout=COMPILE_S)
        if not done:
            raise InvalidRequest(f"{FIELD} was not compiled within {COMPILE_S:g} s; write it simpler", field=FIELD)
        compiled = work.result()
        self._keep(grammar, compiled)
        return compiled

    def _compile_now(self, grammar: Grammar) -> CompiledGrammar:
        with self._making:
            if self._compiler is None:
                vocabulary = _vocabulary(self._tokenizer, self._vocab_size, self._ends)
                self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=_COMPILE_THREADS, cache_enabled=False)
        refuse_ignored_parts(grammar)
        try:
            match grammar:
                case JsonSchema(json_schema=schema):
                    compiled = self._compiler.compile_json_schema(schema)
                case RegexGrammar(regex=expression):
                    compiled = self._compiler.compile_regex(expression)
                case EbnfGrammar(ebnf=text):
                    compiled = self._compiler.compile_grammar(text)
        except (RuntimeError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"{FIELD}: xgrammar cannot compile the {grammar.kind}: {_said(error)}", field=FIELD
            ) from error
        if GrammarState(compiled).is_stuck:
            raise InvalidRequest(f"{FIELD}: no text is of this {grammar.kind}; loosen it", field=FIELD)
        return compiled

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        self._kept[grammar] = compiled
        self._nbytes += compiled.memory_size_bytes
        while self._nbytes > _KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._nbytes -= oldest.memory_size_bytes


class GrammarState:
    """The place in its grammar that one sample has reached.

    Args:
        compiled: The grammar.
        token_ids: Tokens that were drawn earlier.

    Raises:
        InvalidRequest: ``token_ids`` are not of the grammar.
    """

    def __init__(self, compiled: CompiledGrammar, token_ids: Sequence[int] = ()) -> None:
        self.matcher = xgrammar.GrammarMatcher(compiled)
        self._vocab_size = compiled.tokenizer_info.vocab_size
        self._has_ends = bool(compiled.tokenizer_info.stop_token_ids)
        for index, token_id in enumerate(token_ids):
            if not self.matcher.accept_token(token_id):
                raise InvalidRequest(f"{FIELD}: resumed token {index} ({token_id}) is not of the grammar", field=FIELD)

    def take(self, token_id: int) -> None:
        """Go on to the state after ``token_id``."""
        if not self.matcher.accept_token(token_id):
            raise EngineInternalError(f"token {token_id} was drawn, which the grammar does not allow")

    @property
    def is_complete(self) -> bool:
        """True if the grammar allows no further token and the model has no EOS id, which would otherwise be drawn."""
        return not self._has_ends and self.matcher.is_completed() and self.is_stuck

    @property
    def is_stuck(self) -> bool:
        """True if the grammar allows no token, not even EOS."""
        if self.matcher.is_terminated():
            return False
        bits = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        self.matcher.fill_next_token_bitmask(bits)
        return not bool(bits.any())


class GrammarMask:
    """Masks the logits of a batch, all rows in one call."""

    def __init__(self, device: torch.device) -> None:
        self._filler = xgrammar.BatchGrammarMatcher()
        is_forbidden = (torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 0
        self._biases = torch.zeros(256, 8).masked_fill(is_forbidden, -torch.inf).to(device)
        """For each value of an octet, the biases of its eight tokens, the lowest bit's first."""

    def apply(self, logits: torch.Tensor, states: Sequence[GrammarState | None]) -> torch.Tensor:
        """Return a float32 copy of ``logits`` in which tokens that a row's grammar forbids are minus infinity.

        Args:
            logits: Shape (rows, vocabulary).
            states: One for each row; None for a row without a grammar.
        """
        rows = [row for row, state in enumerate(states) if state is not None]
        bits = xgrammar.allocate_token_bitmask(len(states), logits.shape[-1])
        matchers = [state.matcher for state in states if state is not None]
        self._filler.batch_fill_next_token_bitmask(matchers, bits, rows)
        # Not by xgrammar's kernels, which need triton on a GPU and import it everywhere.
        octets = bits.view(torch.uint8).flatten().to(self._biases.device).int()
        bias = self._biases.index_select(0, octets).view(len(states), -1)
        return bias[:, : logits.shape[-1]].add_(logits)


def _vocabulary(tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> xgrammar.TokenizerInfo:
    """Return the bytes of each token. Special tokens have none: a grammar is about text, which leaves them out."""
    inner: Any = tokenizer.inner
    known = xgrammar.TokenizerInfo.from_huggingface(inner, vocab_size=size, stop_token_ids=[0])
    texts = known.decoded_vocab
    added = inner.added_tokens_decoder
    for token_id in {*inner.all_special_ids, *(i for i, token in added.items() if token.special)}:
        if token_id < size:
            texts[token_id] = b""
    return xgrammar.TokenizerInfo(
        texts,
        xgrammar.VocabType.RAW,
        vocab_size=size,
        stop_token_ids=[end for end in ends if 0 <= end < size],
        add_prefix_space=known.add_prefix_space,
    )


def _said(error: Exception) -> str:
    """Return xgrammar's words, without the time and source line that precede them."""
    first = str(error).strip().split("\n", 1)[0]
    return first.split(": ", 1)[-1] if first.startswith("[") else first
