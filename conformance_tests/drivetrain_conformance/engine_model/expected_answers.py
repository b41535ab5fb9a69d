"""Expected answers: recorded once for each set of weights, and compared with completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from drivetrain.engine.engine import InferenceEngine
from drivetrain.types.capability import Capability
from drivetrain.types.outputs import Completion, FinishReason, VersionSpan
from drivetrain.types.sampling import DisallowedTokens, LogprobsMode, SamplingParams, TemperatureSchedule
from drivetrain_conformance.references.oracle import Logits, Oracle, log_softmax
from drivetrain_conformance.references.reference_sampling import step


class End(Enum):
    """The required end of a request."""

    WHOLE = "whole"
    """By itself, with every token of the answer."""
    ABORTED = "aborted"
    """Marked aborted, with the first tokens of the answer, possibly none."""
    ABORTED_OR_WHOLE = "aborted or whole"
    """Aborted while it ran, so it may have ended by itself first."""
    EMPTY = "empty"
    """Marked aborted, without a token: it had not begun."""


class Style(Enum):
    """The way in which a request chooses tokens."""

    PLAIN = "plain"
    """The most likely token each time."""
    PENALISED = "penalised"
    """The most likely token after penalties, which depend on the tokens generated so far, biases, and a mask."""
    SEEDED = "seeded"
    """Drawn with a seed, while the temperature rises with the tokens generated so far."""


_PENALTIES: Final = {
    "repetition_penalty": (Capability.REPETITION_PENALTY, 1.3),
    "frequency_penalty": (Capability.FREQUENCY_PENALTY, 0.6),
    "presence_penalty": (Capability.PRESENCE_PENALTY, 0.5),
}


_SEED: Final = 2**63 - 2**9 - 3
"""Seed whose high and low bits count."""
_STEPS: Final = 60
"""Tokens over which the temperature rises: a request that is frozen has not come to the end."""
_FIRST_IDS: Final = 512
"""Ids of which some are biased, and some cannot be drawn."""


def styles_of(engine: InferenceEngine) -> list[Style]:
    """Return the styles whose answers an engine repeats exactly."""
    # With coarser rounding a repeated draw may legitimately differ at any token.
    seeded = engine.supports(Capability.SEED) and engine.model_info.dtype == "float32"
    penalised = any(engine.supports(needed) for needed, _ in _PENALTIES.values())
    return [Style.PLAIN, *[Style.PENALISED] * penalised, *[Style.SEEDED] * seeded]


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a request in a history, beside its prompt and number of tokens."""

    style: Style = Style.PLAIN
    lora: bool = False
    """Use the adapter :data:`ADAPTER`."""
    stop: bool = False
    """Stop at a token id that its answer contains."""
    logprobs: bool = False
    scores: bool = False
    """Ask for prompt logprobs."""
    priority: int = 0


ADAPTER: Final = "adapter"
"""Name of the adapter that requests use."""


def params_of(
    engine: InferenceEngine, tokens: int, n: int = 1, fields: Fields | None = None, stops: Sequence[int] = ()
) -> SamplingParams:
    """Return params of a request whose answer is recorded, ignoring EOS if the engine can."""
    fields = fields or Fields()
    given: dict[str, object] = {"max_new_tokens": tokens, "temperature": 0, "n": n}
    given["ignore_eos"] = engine.supports(Capability.IGNORE_EOS)
    match fields.style:
        case Style.PLAIN:
            pass
        case Style.PENALISED:
            given |= {name: value for name, (needed, value) in _PENALTIES.items() if engine.supports(needed)}
            if engine.supports(Capability.LOGIT_BIAS):
                given["logit_bias"] = dict.fromkeys(_some_ids(engine, every=7), 1.5)
            if engine.supports(Capability.LOGIT_PROCESSORS):
                given["logit_processors"] = (DisallowedTokens(token_ids=_some_ids(engine, every=3)),)
        case Style.SEEDED:
            given |= {"temperature": 1.0, "seed": _SEED, **({"top_k": 8} if engine.supports(Capability.TOP_K) else {})}
            if engine.supports(Capability.LOGIT_PROCESSORS):
                given["logit_processors"] = (TemperatureSchedule(start=0.5, end=2.0, steps=_STEPS),)
    if stops:
        given["stop_token_ids"] = tuple(stops)
    if fields.logprobs:
        given |= {"logprobs": 0, "logprobs_mode": LogprobsMode.RAW}
    if fields.scores:
        given["prompt_logprobs"] = 0
    return SamplingParams.model_validate(given)


def _some_ids(engine: InferenceEngine, *, every: int) -> tuple[int, ...]:
    return tuple(range(every, min(_FIRST_IDS, engine.model_info.vocab_size), every))


_Key = tuple[int, tuple[int, ...], Style, bool, int]
"""Key of an answer: number of the weights, prompt, style, True with the adapter, index of the sample."""
_SAMPLES: Final = {Style.PLAIN: 1, Style.PENALISED: 1, Style.SEEDED: 2}
"""Recorded samples of each prompt: seeded samples differ."""


@dataclass(slots=True, kw_only=True)
class Answers:
    """Expected answers to each prompt, by weights and style: recorded once, and compared with completions.

    Two batches may round differently. A token that differs from the recorded answer is therefore accepted if an
    independent forward pass finds no token that is more likely, within ``tolerance``.
    """

    folders: Sequence[Path]
    """Model folder of each set of weights; the first one is the engine's own."""
    adapted: Sequence[Path]
    """The same folders with the adapter merged in, if there is one."""
    noted: Mapping[_Key, list[int]]
    params: Mapping[Style, SamplingParams]
    original: str
    """Version of the engine's own weights."""
    made_by: dict[str, int]
    """Version → set of weights. Whoever updates adds the new version."""
    claims_spans: bool
    oracle: Callable[[Path], Oracle | None]
    tolerance: float

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
        styles: Sequence[Style] = (Style.PLAIN,),
        adapted: Sequence[Path] = (),
    ) -> Answers:
        """Record an engine's answers with each set of weights; its own, the first set, are loaded last.

        Args:
            engine: The engine, ready; :data:`ADAPTER` is loaded if ``adapted`` is given.
            folders: Model folder of each set of weights.
            prompts: The prompts.
            tokens: Maximum length of an answer.
            oracle: Makes the independent source of a folder's logits.
            tolerance: Allowed difference of logprobs.
            styles: The styles to record.
            adapted: ``folders`` with the adapter merged in.
        """
        version = engine.get_weight_version()
        params = {style: params_of(engine, tokens, n=_SAMPLES[style], fields=Fields(style)) for style in styles}
        noted: dict[_Key, list[int]] = {}
        for index in reversed(range(len(folders))):
            if len(folders) > 1:
                label = version if index == 0 else f"noting-{index}"
                await engine.load_weights_from_disk(str(folders[index]), label)
            for lora in (None, *[ADAPTER] * bool(adapted)):
                asked = [(list(prompt), style) for style in styles for prompt in prompts]
                output = await engine.generate(
                    [prompt for prompt, _ in asked], [params[style] for _, style in asked], lora=lora
                )
                for completion in output.completions:
                    prompt, style = asked[completion.prompt_index]
                    noted[index, tuple(prompt), style, lora is not None, completion.sample_index] = completion.token_ids
        return cls(
            folders=folders,
            adapted=adapted,
            noted=noted,
            params=params,
            original=version,
            made_by={version: 0},
            claims_spans=engine.supports(Capability.VERSION_SPANS),
            oracle=oracle,
            tolerance=tolerance,
        )

    @property
    def styles(self) -> list[Style]:
        """The recorded styles."""
        return list(self.params)

    def of(
        self,
        weights: int,
        prompt: Sequence[int],
        fields: Fields | None = None,
        sample: int = 0,
        tokens: int | None = None,
    ) -> list[int]:
        """Return the recorded answer, cut where ``fields`` end it."""
        fields = fields or Fields()
        sample = sample if fields.style is Style.SEEDED else 0
        ids = self.noted[weights, tuple(prompt), fields.style, fields.lora, sample][:tokens]
        ends = [at for at, token in enumerate(ids, 1) if token in self.stops(prompt, fields)]
        return ids[: ends[0]] if ends else ids

    def stops(self, prompt: Sequence[int], fields: Fields) -> list[int]:
        """Return the stop token ids of a request with these fields: one from the middle of its first answer."""
        if not fields.stop:
            return []
        ids = self.noted[0, tuple(prompt), fields.style, fields.lora, 0]
        return ids[len(ids) // 2 :][:1]

    def check(
        self,
        completion: Completion,
        tokens: int,
        end: End,
        versions: Sequence[str],
        stale: Sequence[str] = (),
        fields: Fields | None = None,
    ) -> None:
        """Compare one completion with the recorded answer.

        Args:
            completion: The completion.
            tokens: The requested number of tokens.
            end: The end that it must have had.
            versions: Weight versions under which it ran, in order.
            stale: Versions under which it ran on a cache of older weights; their tokens are not compared.
            fields: Further fields of the request.
        """
        fields = fields or Fields()
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
        prompt = completion.prompt_token_ids
        passed = set(completion.token_ids[:-1]).intersection(self.stops(prompt, fields))
        assert not passed, f"it went on past the stop token ids {sorted(passed)}: {completion.token_ids}"
        spans = self._spans(completion, versions)
        for span in spans:
            if span.version not in stale:
                self._check_span(completion, span, fields)
        if fields.scores and count:
            self._check_scores(completion, versions, fields)
        if not aborted and len(spans) == 1:
            noted = self.of(self.made_by[spans[0].version], prompt, fields, completion.sample_index, tokens)
            if completion.token_ids == noted[:count]:
                assert count == len(noted), f"it ended by {reason.value} with {count} of {len(noted)} tokens"

    def _spans(self, completion: Completion, versions: Sequence[str]) -> list[VersionSpan]:
        """Return the version spans of a completion, or the only possible span if it has none."""
        count, found = len(completion.token_ids), list(completion.weight_versions)
        if not found:
            assert not (self.claims_spans and count), f"{count} tokens, and no version made them"
            return [VersionSpan(versions[0], 0, count)] if count and len(versions) == 1 else []
        bounds = [0, *(span.end for span in found)]
        assert [span.start for span in found] == bounds[:-1], f"the version spans have gaps: {found}"
        assert bounds[-1] == count, f"the version spans cover {bounds[-1]} of {count} tokens: {found}"
        allowed = iter(versions)
        assert all(span.version in allowed for span in found), f"it ran under {list(versions)}, its spans are {found}"
        return found

    def _folder(self, version: str, fields: Fields) -> Path:
        return (self.adapted if fields.lora else self.folders)[self.made_by[version]]

    def _check_span(self, completion: Completion, span: VersionSpan, fields: Fields) -> None:
        ids, prompt = completion.token_ids, completion.prompt_token_ids
        noted = self.of(self.made_by[span.version], prompt, fields, completion.sample_index)
        repeats = span.start == 0 and ids[: span.end] == noted[: span.end]
        if repeats and completion.logprobs is None:
            return
        oracle = self.oracle(self._folder(span.version, fields))
        if oracle is None:
            assert span.start or repeats, (
                f"tokens {ids[: span.end]} are not those that version {span.version!r} answered before"
            )
            return
        rows = oracle.logits([*prompt, *ids])[len(prompt) - 1 :]
        if not repeats:
            assert span.start or fields.style is not Style.SEEDED, (
                f"its seed drew {ids[: span.end]}, and {noted[: span.end]} before"
            )
            self._check_choices(completion, span, rows, fields)
        if completion.logprobs is not None:
            raw = log_softmax(rows[span.start : span.end])
            for position, row in enumerate(raw, span.start):
                off = abs(completion.logprobs[position] - float(row[ids[position]]))
                assert off <= self.tolerance, (
                    f"the logprob of token {position} of {len(ids)} is {off:.3g} nats from that of version "
                    f"{span.version!r}, which made it"
                )

    def _check_choices(self, completion: Completion, span: VersionSpan, rows: Logits, fields: Fields) -> None:
        """Assert that each token is one that these logits choose, in the style of the request."""
        ids, prompt, params = completion.token_ids, completion.prompt_token_ids, self.params[fields.style]
        # Penalties magnify errors of logits.
        allowed = self.tolerance * (4 if fields.style is Style.PENALISED else 1)
        for position in range(span.start, span.end):
            of = f"token {position} of {len(ids)}, {ids[position]}, which version {span.version!r} made,"
            step(rows[position], params, prompt, ids[:position], self.tolerance).check_drawn(
                ids[position], params, allowed, of
            )

    def _check_scores(self, completion: Completion, versions: Sequence[str], fields: Fields) -> None:
        """Assert that prompt logprobs are those of one version under which it ran: a retraction may recompute them."""
        prompt, found = completion.prompt_token_ids, completion.prompt_logprobs
        assert found is not None, "logprobs of its prompt were asked for, and there are none"
        assert len(found) == len(prompt), f"{len(prompt)} prompt tokens have {len(found)} logprobs"
        off = []
        for version in versions:
            oracle = self.oracle(self._folder(version, fields))
            if oracle is None:
                return
            rows = log_softmax(oracle.logits(prompt))
            pairs = zip(found[1:], rows, prompt[1:], strict=False)
            off.append(max(abs((value or 0.0) - float(row[token])) for value, row, token in pairs))
        assert min(off) <= self.tolerance, (
            f"logprobs of its prompt are {min(off):.3g} nats from those of versions {list(versions)}"
        )
