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
from drivetrain.types.sampling import LogprobsMode, SamplingParams
from drivetrain_conformance.references.oracle import Logits, Oracle, log_softmax
from drivetrain_conformance.references.reference_sampling import step


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


class Style(Enum):
    """How the tokens of a request are chosen."""

    PLAIN = "plain"
    """The most likely one each time."""
    PENALISED = "penalised"
    """The most likely one after penalties, so that what was generated counts."""
    SEEDED = "seeded"
    """Drawn, with a seed."""

    def __repr__(self) -> str:
        return str(self)


_PENALTIES: Final = {
    "repetition_penalty": (Capability.REPETITION_PENALTY, 1.3),
    "frequency_penalty": (Capability.FREQUENCY_PENALTY, 0.6),
    "presence_penalty": (Capability.PRESENCE_PENALTY, 0.5),
}


def styles_of(engine: InferenceEngine) -> list[Style]:
    """Return the styles of which an engine repeats its answers."""
    # Where weights are rounded more, what is drawn may part from its repetition at any token, by right.
    seeded = engine.supports(Capability.SEED) and engine.model_info.dtype == "float32"
    penalised = any(engine.supports(needed) for needed, _ in _PENALTIES.values())
    return [Style.PLAIN, *[Style.PENALISED] * penalised, *[Style.SEEDED] * seeded]


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a request in a history, beside its prompt and number of tokens."""

    style: Style = Style.PLAIN
    lora: bool = False
    """The adapter :data:`ADAPTER`."""
    stop: bool = False
    """A stop token id that its answer holds."""
    logprobs: bool = False
    scores: bool = False
    """Logprobs of its prompt."""
    priority: int = 0


ADAPTER: Final = "adapter"
"""Name of the adapter that requests use."""


def params_of(
    engine: InferenceEngine, tokens: int, n: int = 1, fields: Fields | None = None, stops: Sequence[int] = ()
) -> SamplingParams:
    """Params of a request whose answer is known: past EOS where the engine can."""
    fields = fields or Fields()
    given: dict[str, object] = {"max_new_tokens": tokens, "temperature": 0, "n": n}
    given["ignore_eos"] = engine.supports(Capability.IGNORE_EOS)
    match fields.style:
        case Style.PLAIN:
            pass
        case Style.PENALISED:
            given |= {name: value for name, (needed, value) in _PENALTIES.items() if engine.supports(needed)}
        case Style.SEEDED:
            given |= {"temperature": 1.0, "seed": 29, **({"top_k": 8} if engine.supports(Capability.TOP_K) else {})}
    if stops:
        given["stop_token_ids"] = tuple(stops)
    if fields.logprobs:
        given |= {"logprobs": 0, "logprobs_mode": LogprobsMode.RAW}
    if fields.scores:
        given["prompt_logprobs"] = 0
    return SamplingParams.model_validate(given)


_Key = tuple[int, tuple[int, ...], Style, bool, int]
"""Set of weights, prompt, style, with the adapter or without, sample."""
_SAMPLES: Final = {Style.PLAIN: 1, Style.PENALISED: 1, Style.SEEDED: 2}
"""How many are noted: seeded ones differ."""


class Answers:
    """Expected answers to each prompt, by weights and style: recorded once, and compared with completions.

    Two batches may round differently, so a token that differs from the noted answer is still right if an
    independent forward pass finds none that is more likely, within ``tolerance``.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        noted: Mapping[_Key, list[int]],
        *,
        adapted: Sequence[Path],
        params: Mapping[Style, SamplingParams],
        version: str,
        claims_spans: bool,
        oracle: Callable[[Path], Oracle | None],
        tolerance: float,
    ) -> None:
        self.folders = list(folders)
        """One for each set of weights; the first is the engine's own."""
        self.adapted = list(adapted)
        """The same with the adapter merged in, if there is one."""
        self.original = version
        """The version that the engine has with its own."""
        self.made_by = {version: 0}
        """Version → set of weights. Whoever updates adds the new version."""
        self.tolerance = tolerance
        self._noted = noted
        self._params = params
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
        styles: Sequence[Style] = (Style.PLAIN,),
        adapted: Sequence[Path] = (),
    ) -> Answers:
        """Ask an engine that is ready, with each set of weights; the first is the engine's own, and left behind.

        Args:
            engine: The engine; :data:`ADAPTER` is loaded if ``adapted`` is given.
            folders: One for each set of weights.
            prompts: What is asked.
            tokens: Most tokens of an answer.
            oracle: Makes the independent source of a folder's logits.
            tolerance: How far logprobs may be off.
            styles: Styles in which it is asked.
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
            folders,
            noted,
            adapted=adapted,
            params=params,
            version=version,
            claims_spans=engine.supports(Capability.VERSION_SPANS),
            oracle=oracle,
            tolerance=tolerance,
        )

    @property
    def styles(self) -> list[Style]:
        """Styles in which the engine was asked."""
        return list(self._params)

    def of(
        self,
        weights: int,
        prompt: Sequence[int],
        fields: Fields | None = None,
        sample: int = 0,
        tokens: int | None = None,
    ) -> list[int]:
        """The noted answer, up to where ``fields`` end it."""
        fields = fields or Fields()
        sample = sample if fields.style is Style.SEEDED else 0
        ids = self._noted[weights, tuple(prompt), fields.style, fields.lora, sample][:tokens]
        ends = [at for at, token in enumerate(ids, 1) if token in self.stops(prompt, fields)]
        return ids[: ends[0]] if ends else ids

    def stops(self, prompt: Sequence[int], fields: Fields) -> list[int]:
        """The stop token ids of a request with these fields: one from the middle of its first answer."""
        if not fields.stop:
            return []
        ids = self._noted[0, tuple(prompt), fields.style, fields.lora, 0]
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
        """Hold one completion against what was noted.

        Args:
            completion: What came back for at most ``tokens`` tokens.
            tokens: How many were asked for.
            end: How it must have ended.
            versions: Weight versions under which it ran, in order.
            stale: Those under which its cache was of older weights: its tokens there are no one's answer.
            fields: What else was asked for.
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

    def _folder(self, version: str, fields: Fields) -> Path:
        return (self.adapted if fields.lora else self.folders)[self.made_by[version]]

    def _check_span(self, completion: Completion, span: VersionSpan, fields: Fields) -> None:
        ids, prompt = completion.token_ids, completion.prompt_token_ids
        noted = self.of(self.made_by[span.version], prompt, fields, completion.sample_index)
        repeats = span.start == 0 and ids[: span.end] == noted[: span.end]
        if repeats and completion.logprobs is None:
            return
        oracle = self._oracle(self._folder(span.version, fields))
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
        """Each token is one that these logits choose, in the style of the request."""
        ids, prompt, params = completion.token_ids, completion.prompt_token_ids, self._params[fields.style]
        # Penalties magnify how far logits may be off.
        allowed = self.tolerance * (4 if fields.style is Style.PENALISED else 1)
        for position in range(span.start, span.end):
            chosen = step(rows[position], params, prompt, ids[:position], self.tolerance)
            if fields.style is Style.SEEDED:
                assert chosen.possibly[ids[position]], (
                    f"token {position} of {len(ids)} is {ids[position]}, which version {span.version!r} cannot draw"
                )
                continue
            short = float(chosen.scaled.max() - chosen.scaled[ids[position]])
            assert short <= allowed, (
                f"token {position} of {len(ids)} was made by version {span.version!r}, which would have chosen "
                f"{int(chosen.scaled.argmax())} and not {ids[position]} ({short:.3g} nats less likely)"
            )

    def _check_scores(self, completion: Completion, versions: Sequence[str], fields: Fields) -> None:
        """Logprobs of the prompt are those of a version under which it ran: a retraction may compute them anew."""
        prompt, found = completion.prompt_token_ids, completion.prompt_logprobs
        assert found is not None, "logprobs of its prompt were asked for, and there are none"
        assert len(found) == len(prompt), f"{len(prompt)} prompt tokens have {len(found)} logprobs"
        off = []
        for version in versions:
            oracle = self._oracle(self._folder(version, fields))
            if oracle is None:
                return
            rows = log_softmax(oracle.logits(prompt))
            pairs = zip(found[1:], rows, prompt[1:], strict=False)
            off.append(max(abs((value or 0.0) - float(row[token])) for value, row, token in pairs))
        assert min(off) <= self.tolerance, (
            f"logprobs of its prompt are {min(off):.3g} nats from those of versions {list(versions)}"
        )
