"""Builds the requests that a backend is given from the arguments of a call."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from drivetrain.backend.base import GenerateRequest, ModelInfo, ReadMedium
from drivetrain.checks.limits import MOST_SAMPLES_OF_A_CALL
from drivetrain.checks.safe_repr import shown
from drivetrain.checks.simple_values import LONGEST_REQUEST_ID, check_name
from drivetrain.engine.samples import READ, Given, Samples
from drivetrain.engine.validation import (
    as_prompt,
    check_media,
    check_params_fit,
    check_params_supported,
    check_prompt_ids,
    check_sampling_params,
    check_some_token_is_left,
    given_prompts,
    require,
    resolve_max_new_tokens,
)
from drivetrain.errors import InvalidRequest
from drivetrain.media.inputs import placed
from drivetrain.text.prompt_threads import in_prompt_thread
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.prompts import Prompt, PromptLike, TextPrompt, TokenPrompt
from drivetrain.types.sampling import SamplingParams

ParamsLike = SamplingParams | Mapping[str, object]
_T = TypeVar("_T")

_IN_LOOP: Final = 2048
"""Most microseconds, estimated, of reading prompts in the event loop; a thread costs about 200."""

_SEEDS_OF_A_HOLDER: Final = 1 << 40
"""More samples than a process makes."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Arguments of a call that generates, for all of its prompts; see ``InferenceEngine.generate``."""

    request_ids: Sequence[str] | None = None
    lora: str | None = None
    priority: int = 0
    weight_version: str | None = None
    timeout: float | None = None


class RequestBuilder:
    """Builds the samples of a call and refuses invalid ones before any work.

    Args:
        config: The engine's configuration.
        capabilities: The engine's capabilities.
        model: The model.
        tokenizer: Its tokenizer.
        holder: Number of this process among those that make requests of the engine; each draws with seeds of its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        capabilities: frozenset[Capability],
        model: ModelInfo,
        tokenizer: Tokenizer,
        holder: int = 0,
    ) -> None:
        self._config = config
        self._capabilities = capabilities
        self._model = model
        self._tokenizer = tokenizer
        self._seeds_taken = holder * _SEEDS_OF_A_HOLDER

    def build(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None,
        options: CallOptions,
    ) -> list[Samples]:
        """Validate a call except for its prompts, and return the samples of each; :meth:`read` validates the prompts.

        Raises:
            InvalidRequest: a field is wrong, or there is no prompt.
            UnsupportedCapability: a field needs what this engine does not claim.
        """
        given = given_prompts(prompts)
        params = self._params(sampling_params, len(given))
        ids = self._ids(options.request_ids, len(given))
        lora, priority, weight_version = options.lora, options.priority, options.weight_version
        if lora is not None:
            require(self._capabilities, Capability.LORA, f"lora={shown(lora)}", self._config.backend)
        if type(priority) is not int:
            raise InvalidRequest(f"priority={shown(priority)}: expected an integer; higher is sooner", field="priority")
        if priority:
            require(self._capabilities, Capability.PRIORITY, f"priority={priority}", self._config.backend)
        if weight_version is not None:
            check_name("weight_version", weight_version)
            claim = f"weight_version={shown(weight_version)}"
            require(self._capabilities, Capability.VERSION_SPANS, claim, self._config.backend)
        total = sum(one.n for one in params)
        if total > MOST_SAMPLES_OF_A_CALL:
            raise InvalidRequest(
                f"{len(given)} prompts ask for {total} completions; expected at most {MOST_SAMPLES_OF_A_CALL} in one "
                "call, so make several",
                field="prompts",
            )
        return [
            self._samples(index, prompt, one, request_id, lora, priority, weight_version)
            for index, (prompt, one, request_id) in enumerate(zip(given, params, ids, strict=True))
        ]

    async def read(self, prompts: Sequence[Samples], whole: Callable[[list[int]], list[int]] | None = None) -> None:
        """Validate the prompts of a call and turn them into token ids, in a thread if that takes long.

        Args:
            prompts: As :meth:`build` returned them.
            whole: Makes the ids of a whole conversation from those of its new turn.

        Raises:
            InvalidRequest: a prompt is wrong.
            UnsupportedCapability: a prompt holds media of a kind that this engine does not claim.
            DeadlineExceeded: a chat template did not end in time.
        """

        def read_all() -> None:
            given = [samples.given for samples in prompts]
            for samples, prompt in zip(prompts, self._prompts(given), strict=True):
                self._read(samples, prompt, whole)

        await _aside(read_all, [samples.given for samples in prompts])

    def _read(self, samples: Samples, prompt: Prompt, whole: Callable[[list[int]], list[int]] | None) -> None:
        index, request = samples.prompt_index, samples.request
        if whole is not None and prompt.media:
            raise InvalidRequest(
                "turns of a session hold no images, video or audio yet; use generate()", field="prompts"
            )
        token_ids = self._encode(index, prompt)
        where = f"prompts[{index}]"
        if whole is not None:
            token_ids = whole(token_ids)
            check_prompt_ids(token_ids, where, self._model)
        max_new_tokens = resolve_max_new_tokens(request.params, len(token_ids), where, self._model)
        samples.request = replace(
            request, prompt_token_ids=token_ids, max_new_tokens=max_new_tokens, media=prompt.media
        )
        samples.given = READ

    async def prompt_token_ids(self, prompts: PromptLike | Sequence[PromptLike]) -> list[list[int]]:
        """Validate prompts for a call that does not generate, and return the token ids of each.

        Raises:
            InvalidRequest: a prompt is wrong, or holds media.
            UnsupportedCapability: a prompt holds media of a kind that this engine does not claim.
            DeadlineExceeded: a chat template did not end in time.
        """
        given = given_prompts(prompts)

        def read() -> list[list[int]]:
            checked = self._prompts(given)
            token_ids = [self._encode(index, prompt) for index, prompt in enumerate(checked)]
            if any(prompt.media for prompt in checked):
                raise InvalidRequest("only generate() takes images, video and audio beside a prompt", field="prompts")
            return token_ids

        return await _aside(read, given)

    def _prompts(self, given: Sequence[Given]) -> list[Prompt]:
        return [as_prompt(one, where, self._model.context_length) for where, one in given]

    def place(self, samples: Samples, media: Sequence[ReadMedium]) -> None:
        """Insert the placeholder tokens of images, videos and sounds into the prompt of these samples.

        Raises:
            InvalidRequest: the prompt has no places for them, or exceeds the context length with them.
        """
        where = f"prompts[{samples.prompt_index}]"
        request = samples.request
        token_ids = placed(request.prompt_token_ids, media, where)
        check_prompt_ids(token_ids, where, self._model)
        max_new_tokens = resolve_max_new_tokens(request.params, len(token_ids), where, self._model)
        held = tuple(
            given if read.data is None else type(given)(data=read.data)
            for given, read in zip(request.media, media, strict=True)
        )
        samples.request = replace(request, prompt_token_ids=token_ids, max_new_tokens=max_new_tokens, media=held)

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        where = f"prompts[{index}]"
        if prompt.media:
            check_media(prompt, where, self._config, self._capabilities)
        token_ids = self._tokenizer.encode(prompt, self._model.context_length, where)
        check_prompt_ids(token_ids, where, self._model)
        if len(prompt.media) > len(token_ids):
            raise InvalidRequest(
                f"{where} has {len(prompt.media)} images, videos and sounds beside {len(token_ids)} tokens; each takes "
                "one of them",
                field=where,
            )
        return token_ids

    def _samples(
        self,
        index: int,
        given: Given,
        params: SamplingParams,
        request_id: str,
        lora: str | None,
        priority: int,
        weight_version: str | None,
    ) -> Samples:
        stop_ids = params.stop_token_ids
        # A grammar ends with EOS; past it an engine would generate without the grammar.
        if not params.ignore_eos or params.structured_output is not None:
            stop_ids += tuple(eos for eos in self._model.eos_token_ids if eos not in stop_ids)
        check_some_token_is_left(params, stop_ids, self._model)
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=[],
            params=params,
            max_new_tokens=0,
            stop_token_ids=stop_ids,
            logprobs_mode=params.logprobs_mode or self._config.logprobs_mode,
            lora=lora,
            priority=priority,
            weight_version=weight_version,
        )
        return Samples(request, index, self._seeds_of(params), given, vocab_size=self._model.vocab_size)

    def _seeds_of(self, params: SamplingParams) -> Callable[[int], int | None]:
        if params.seed is not None:
            given = params.seed
            return lambda index: (given + index) % 2**63
        if self._config.seed is not None and Capability.SEED in self._capabilities:
            # Multiplied, so that samples of neighbouring calls do not get the seed of a request that brings its own.
            first, configured = self._seeds_taken + 1, self._config.seed
            self._seeds_taken += params.n
            return lambda index: (configured + (first + index) * 0x9E3779B97F4A7C15) % 2**63
        return lambda index: None

    def _params(self, value: ParamsLike | Sequence[ParamsLike] | None, prompts: int) -> list[SamplingParams]:
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) != prompts:
                raise InvalidRequest(
                    f"sampling_params has {len(value)} entries for {prompts} prompts; give one for all or one for each",
                    field="sampling_params",
                )
            by_identity = {id(item): check_sampling_params(item) for item in {id(one): one for one in value}.values()}
            checked = [by_identity[id(item)] for item in value]
        else:
            checked = [check_sampling_params(value)] * prompts
        for params in {id(item): item for item in checked}.values():
            check_params_supported(params, self._config, self._capabilities)
            check_params_fit(params, self._model, self._tokenizer.special_tokens)
        return checked

    @staticmethod
    def _ids(request_ids: Sequence[str] | None, prompts: int) -> list[str]:
        if request_ids is None:
            call = uuid.uuid4().hex[:16]
            return [f"{call}-{index}" for index in range(prompts)]
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        if not isinstance(request_ids, Sequence):
            raise InvalidRequest(
                f"request_ids is a {type(request_ids).__name__}; expected a list of strings", field="request_ids"
            )
        if len(request_ids) != prompts:
            raise InvalidRequest(
                f"request_ids has {len(request_ids)} entries for {prompts} prompts; give one for each",
                field="request_ids",
            )
        for request_id in request_ids:
            check_name("request_ids", request_id, LONGEST_REQUEST_ID)
        if len(set(request_ids)) != len(request_ids):
            twice = next(item for item in request_ids if list(request_ids).count(item) > 1)
            raise InvalidRequest(f"request id {shown(twice)} is given twice; ids must differ", field="request_ids")
        return list(request_ids)


async def _aside(read: Callable[[], _T], given: Sequence[Given]) -> _T:
    """Call ``read``, in a thread if these prompts take long."""
    return await in_prompt_thread(read) if _takes_long(given) else read()


def _takes_long(given: Sequence[Given]) -> bool:
    """Return True if reading these prompts would block the event loop for more than a few milliseconds."""
    microseconds = 0
    for _, prompt in given:
        match prompt:
            case str():
                microseconds += len(prompt)
            case TextPrompt(text=str(text)):
                microseconds += len(text)
            case TokenPrompt(token_ids=tuple(ids)):
                microseconds += len(ids) // 64
            case Sequence() if prompt and isinstance(prompt[0], int):
                microseconds += len(prompt) // 64
            case _:
                return True  # a chat template is a program, and takes as long as it likes; others are refused
        microseconds += 16
        if microseconds > _IN_LOOP:
            return True
    return False
