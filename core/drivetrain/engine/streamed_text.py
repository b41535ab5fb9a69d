"""The text of a sample that ``InferenceEngine`` reads as a stream."""

from __future__ import annotations

from dataclasses import replace

from drivetrain.backend.base import GenerateResult
from drivetrain.engine.samples import Sample
from drivetrain.text.stops import StopMatcher
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.outputs import ReleasedText


class StreamedText:
    """Decodes and matches the ids of one sample, each once, for backends that do not match them themselves."""

    def __init__(self, sample: Sample, tokenizer: Tokenizer) -> None:
        self._matcher = StopMatcher(sample.request.params, tokenizer)
        self._stop_ids = frozenset(sample.request.stop_token_ids)
        self._held: list[int] = []
        """Stop ids at the end so far: only the result says whether they are part of the text."""
        self.matched = False

    def add(self, token_ids: list[int]) -> bool:
        """Add new ids, and return True if they complete the first match."""
        for token_id in token_ids:
            self._held.append(token_id)
            if token_id not in self._stop_ids:
                held, self._held = self._held, []
                if self._push(held):
                    return True
        return False

    def release(self) -> ReleasedText:
        """Return the text that no later stop match can remove."""
        return self._matcher.release()

    def end(self, result: GenerateResult) -> GenerateResult:
        """Return the result with its matched text, unless its ids are not those that were streamed."""
        ids = result.token_ids if result.matched_stop is None else result.token_ids[:-1]
        known = self._matcher.token_ids
        if ids[: len(known)] != known:
            return result
        if not self.matched:
            self._push(ids[len(known) :])
        return replace(result, matched_text=self._matcher.outcome())

    def _push(self, token_ids: list[int]) -> bool:
        self.matched = any(self._matcher.push(token_id) is not None for token_id in token_ids)
        return self.matched
