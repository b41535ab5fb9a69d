"""The served engine of a front-end: adapters are those of the engine's owner."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from drivetrain.attached.engine import AttachedEngine
from drivetrain.errors import InvalidRequest
from drivetrain.openai.engine_calls import Call
from drivetrain.types.outputs import CompletionChunk, GenerationOutput
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.front_ends.calls import Caller
from drivetrain_serving.served_engine import EngineCall, ServedEngine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LOADS: Final = 5
"""Times that an adapter is loaded for one request, if other requests take its place before the engine has this one."""


class FrontEndEngine(ServedEngine):
    """An attached engine, and the owner's adapters.

    Args:
        engine: The engine.
        config: The server's configuration.
        owner: Calls :class:`~drivetrain_serving.front_ends.calls.OwnerCalls`.
    """

    def __init__(self, engine: AttachedEngine, config: ServerConfig, owner: Caller) -> None:
        super().__init__(engine, config)
        self._owner = owner

    async def _require_adapter(self, name: str) -> None:
        await self._owner.call("load_adapter", name)

    async def generate(self, call: EngineCall) -> GenerationOutput:
        for _ in range(_LOADS):
            try:
                return await super().generate(call)
            except InvalidRequest as error:
                await self._load_again(call, error)
        return await super().generate(call)

    async def score_and_generate(self, token_ids: Sequence[int], at: NDArray[np.int64], call: Call) -> GenerationOutput:
        for _ in range(_LOADS):
            try:
                return await super().score_and_generate(token_ids, at, call)
            except InvalidRequest as error:
                await self._load_again(call, error)
        return await super().score_and_generate(token_ids, at, call)

    async def generate_stream(self, call: EngineCall) -> AsyncGenerator[CompletionChunk, None]:
        for loads in range(_LOADS + 1):
            begun = False
            try:
                async with aclosing(super().generate_stream(call)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except InvalidRequest as error:
                if begun or loads == _LOADS:
                    raise
                await self._load_again(call, error)

    async def _load_again(self, call: EngineCall, error: InvalidRequest) -> None:
        """Load the request's adapter if it was unloaded before the engine had the request.

        Raises:
            InvalidRequest: The engine has refused the request for another reason, or the adapter is gone.
        """
        if call.lora is None or error.field != "lora":
            raise error
        await self._require_adapter(call.lora)
