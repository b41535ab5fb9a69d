"""An echo with a delay: a language model without weights whose next token is the one four places back."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drivetrain.backend import Backend, EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.errors import EngineStartError, InvalidConfig
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import FinishReason, VersionSpan
from drivetrain.types.sampling import LogprobsMode


def next_token_logits(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.float64]:
    """Return the model's logits: the token four places back, or the first, is as likely as all others together."""
    logits = np.zeros(vocab_size)
    logits[token_ids[-4:][0]] = np.log(vocab_size - 1)
    return logits


def log_softmax(logits: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Return the logprob of each token at a temperature."""
    scaled = (logits - logits.max()) / temperature
    return np.asarray(scaled - np.log(np.exp(scaled).sum()))


def draw(request: GenerateRequest, so_far: list[int], vocab_size: int, rng: np.random.Generator) -> tuple[int, float]:
    """Draw the next token; return it with its logprob."""
    params, temperature = request.params, request.params.temperature or 1.0
    logits = next_token_logits(request.prompt_token_ids + so_far, vocab_size)
    allowed = logits.copy()
    if len(so_far) < params.min_new_tokens:
        allowed[list(request.stop_token_ids)] = -np.inf
    probabilities = np.exp(log_softmax(allowed, temperature))
    token_id = int(allowed.argmax() if params.temperature == 0 else rng.choice(vocab_size, p=probabilities))
    divisor = temperature if request.logprobs_mode is LogprobsMode.TEMPERATURE else 1.0
    return token_id, float(log_softmax(logits, divisor)[token_id])


def model_info(folder: Path) -> ModelInfo:
    """Read the model's properties from its folder."""
    try:
        files = [folder / "config.json", *folder.glob("generation_config.json")]
        read = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        vocab_size, context_length = read[0]["vocab_size"], read[0]["max_position_embeddings"]
    except (OSError, ValueError, KeyError) as error:
        raise EngineStartError(f"the configuration in {folder} cannot be used: {error!r}") from error
    named = [config.get("eos_token_id") for config in read]
    ends = itertools.chain(*(eos if isinstance(eos, list) else [eos] for eos in named))
    eos_ids = tuple(dict.fromkeys(eos for eos in ends if eos is not None))
    return ModelInfo(vocab_size, context_length, eos_ids, "float32", architecture="Echo", parameters=0, device="cpu")


def spans(versions: list[str]) -> list[VersionSpan]:
    """Merge adjacent tokens of the same version into spans."""
    starts = [i for i, version in enumerate(versions) if versions[:i][-1:] != [version]]
    return [VersionSpan(versions[start], start, end) for start, end in itertools.pairwise([*starts, len(versions)])]


_NUMBERS = {Capability.LOGPROBS_RAW, Capability.LOGPROBS_TEMPERATURE, Capability.SEED, Capability.DETERMINISTIC}
_ENDS = {Capability.STOP_TOKEN_IDS, Capability.IGNORE_EOS, Capability.MIN_NEW_TOKENS}
_CONTROL = {Capability.STREAMING, Capability.ABORT, Capability.PAUSE_IN_PLACE, Capability.PAUSE_RETRACT}


class EchoBackend(Backend):
    """Runs each request in its own loop, which checks at every token whether it was aborted or frozen."""

    name = "echo"
    engine_distribution = "drivetrain-echo"
    default_isolation = Isolation.INLINE

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return frozenset({*_NUMBERS, *_ENDS, *_CONTROL, Capability.VERSION_SPANS})

    @classmethod
    def validate(cls, config: EngineConfig) -> None:
        if config.engine_kwargs:
            raise InvalidConfig(f"engine_kwargs={config.engine_kwargs}: an echo has no options", field="engine_kwargs")

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._version = config.weight_version
        self._frozen = False
        self._running: set[str] = set()
        self._aborted: set[str] = set()

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        report("reading config.json")
        self._model = model_info(Path(self.config.model))
        return self._model

    async def close(self) -> None:
        await self.abort(list(self._running))

    async def stats(self) -> EngineStats:
        return EngineStats(running=len(self._running), waiting=0, kv_cache_bytes=0, weight_bytes=0)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        rng = np.random.default_rng(request.seed)
        token_ids, logprobs, versions = list[int](), list[float](), list[str]()
        reason: FinishReason | None = None
        self._running.add(request.request_id)
        try:
            while reason is None:
                await asyncio.sleep(0.001)
                if request.request_id in self._aborted:
                    reason = FinishReason.ABORT
                elif not self._frozen:
                    token_id, logprob = draw(request, token_ids, self._model.vocab_size, rng)
                    token_ids.append(token_id)
                    logprobs.append(logprob)
                    versions.append(self._version)
                    if token_id in request.stop_token_ids:
                        reason = FinishReason.STOP
                    elif len(token_ids) == request.max_new_tokens:
                        reason = FinishReason.LENGTH
                    yield TokenDelta([token_id], [logprob])
        finally:
            self._running.discard(request.request_id)
            self._aborted.discard(request.request_id)
        matched = token_ids[-1] if reason is FinishReason.STOP else None
        wanted = logprobs if request.params.logprobs is not None else None
        yield TokenDelta([], [], result=GenerateResult(token_ids, reason, spans(versions), matched, wanted))

    async def abort(self, request_ids: list[str]) -> None:
        self._aborted |= self._running.intersection(request_ids)

    async def freeze(self, mode: PauseMode) -> None:
        self._frozen = True  # there is no cache to release, so both modes are the same

    async def unfreeze(self) -> None:
        self._frozen = False

    async def set_weight_version(self, version: str) -> None:
        self._version = version
