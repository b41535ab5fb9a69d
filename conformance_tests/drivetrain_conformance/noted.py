"""What a model answers at temperature 0, noted once for each set of weights, and completions held against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from drivetrain.capability import Capability
from drivetrain.engine import InferenceEngine
from drivetrain.outputs import Completion, FinishReason, VersionSpan
from drivetrain.sampling import SamplingParams
from drivetrain_conformance.oracle import Oracle


class End(Enum):
    """How a request ends."""

    WHOLE = "whole"
    """By itself, with every token of the answer."""
    ABORTED = "aborted"
    """Marked aborted, with the first tokens of the answer, possibly none."""
    ABORTED_OR_WHOLE = "aborted or whole"
    """It was aborted while it ran, and may have been faster."""
    EMPTY = "empty"
    """Marked aborted, with no token: it had not begun."""


def greedy(engine: InferenceEngine, tokens: int, n: int = 1) -> SamplingParams:
    """Params of a request whose answer is known: past EOS where the engine can."""
    return SamplingParams(max_new_tokens=tokens, temperature=0, n=n, ignore_eos=engine.supports(Capability.IGNORE_EOS))


class Answers:
    """What each set of weights answers to each prompt at temperature 0, noted once, and requests held against it.

    Two batches may round differently, so a token that differs from the noted answer is still right if an
    independent forward pass finds none that is more likely, within ``tolerance``.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        noted: dict[tuple[int, tuple[int, ...]], Completion],
        *,
        version: str,
        claims_spans: bool,
        oracle: Callable[[Path], Oracle | None],
        tolerance: float,
    ) -> None:
        self.folders = list(folders)
        """One for each set of weights; the first is the engine's own."""
        self.original = version
        """The version that the engine has with its own."""
        self.made_by = {version: 0}
        """Version → set of weights. Whoever updates adds the new version."""
        self.tolerance = tolerance
        self._noted = noted
        self._claims_spans = claims_spans
        self._oracle = oracle

    @classmethod
    async def note(
        cls,
        engine: InferenceEngine,
        folders: Sequence[Path],
        prompts: Sequence[Sequence[int]],
        tokens: int,
        *,
        oracle: Callable[[Path], Oracle | None],
        tolerance: float,
    ) -> Answers:
        """Ask an engine that is ready, with each set of weights; the first is the engine's own, and left behind."""
        version = engine.get_weight_version()
        noted = {}
        for index in reversed(range(len(folders))):
            if len(folders) > 1:
                label = version if index == 0 else f"noting-{index}"
                await engine.load_weights_from_disk(str(folders[index]), label)
            params = greedy(engine, tokens)
            output = await engine.generate([list(prompt) for prompt in prompts], params)
            for completion in output.completions:
                noted[index, tuple(completion.prompt_token_ids)] = completion
        return cls(
            folders,
            noted,
            version=version,
            claims_spans=engine.supports(Capability.VERSION_SPANS),
            oracle=oracle,
            tolerance=tolerance,
        )

    def of(self, weights: int, prompt: Sequence[int]) -> list[int]:
        """The noted answer."""
        return self._noted[weights, tuple(prompt)].token_ids

    def check(
        self, completion: Completion, tokens: int, end: End, versions: Sequence[str], stale: Sequence[str] = ()
    ) -> None:
        """Hold one completion against what was noted.

        Args:
            completion: What came back for at most ``tokens`` tokens at temperature 0.
            tokens: How many were asked for.
            end: How it must have ended.
            versions: Weight versions under which it ran, in order.
            stale: Those under which its cache was of older weights: its tokens there are no one's answer.
        """
        count, reason = len(completion.token_ids), completion.finish_reason
        aborted = reason is FinishReason.ABORT
        if end is End.WHOLE:
            assert not aborted, f"it was aborted after {count} tokens, and nobody asked for that"
        elif end is not End.ABORTED_OR_WHOLE:
            assert aborted, f"it ended by {reason.value} after {count} tokens, though it was aborted"
        if end is End.EMPTY:
            assert count == 0, f"it had not begun when it was aborted, and has {count} tokens"
        assert count <= tokens, f"it has {count} tokens, of {tokens} asked for"
        if reason is FinishReason.LENGTH:
            assert count == tokens, f"it ended by its length with {count} of {tokens} tokens"
        spans = self._spans(completion, versions)
        for span in spans:
            if span.version not in stale:
                self._check_span(completion, span)
        if not aborted and len(spans) == 1:
            noted = self.of(self.made_by[spans[0].version], completion.prompt_token_ids)[:tokens]
            if completion.token_ids == noted[:count]:
                assert count == len(noted), f"it ended by {reason.value} with {count} of {len(noted)} tokens"

    def _spans(self, completion: Completion, versions: Sequence[str]) -> list[VersionSpan]:
        """The spans of a completion, or the one that there can be."""
        count, found = len(completion.token_ids), list(completion.weight_versions)
        if not found:
            assert not (self._claims_spans and count), f"{count} tokens, and no version made them"
            return [VersionSpan(versions[0], 0, count)] if count and len(versions) == 1 else []
        bounds = [0, *(span.end for span in found)]
        assert [span.start for span in found] == bounds[:-1], f"the version spans have gaps: {found}"
        assert bounds[-1] == count, f"the version spans cover {bounds[-1]} of {count} tokens: {found}"
        allowed = iter(versions)
        assert all(span.version in allowed for span in found), f"it ran under {list(versions)}, its spans are {found}"
        return found

    def _check_span(self, completion: Completion, span: VersionSpan) -> None:
        weights = self.made_by[span.version]
        ids, prompt = completion.token_ids, completion.prompt_token_ids
        if span.start == 0 and ids[: span.end] == self.of(weights, prompt)[: span.end]:
            return
        oracle = self._oracle(self.folders[weights])
        if oracle is None:
            assert span.start, f"tokens {ids[: span.end]} are not those that version {span.version!r} answered before"
            return
        rows = oracle.logits([*prompt, *ids])[len(prompt) - 1 :]
        for position in range(span.start, span.end):
            short = float(rows[position].max() - rows[position][ids[position]])
            assert short <= self.tolerance, (
                f"token {position} of {len(ids)} was made by version {span.version!r}, which would have chosen "
                f"{int(rows[position].argmax())} and not {ids[position]} ({short:.3g} nats less likely)"
            )
