"""The served engine of a front-end, with the adapters of the engine's owner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from drivetrain.attached.engine import AttachedEngine
from drivetrain.errors import EngineBusy, InvalidRequest
from drivetrain.openai.engine_calls import Call
from drivetrain.types.outputs import CompletionChunk, GenerationOutput
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.front_ends.calls import Caller
from drivetrain_serving.served_engine import EngineCall, ServedEngine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
        until = self._until()
        while True:
            try:
                return await super().generate(call)
            except InvalidRequest as error:
                await self._load_again(call, error, until)

    async def score_and_generate(self, token_ids: Sequence[int], at: NDArray[np.int64], call: Call) -> GenerationOutput:
        until = self._until()
        while True:
            try:
                return await super().score_and_generate(token_ids, at, call)
            except InvalidRequest as error:
                await self._load_again(call, error, until)

    async def generate_stream(self, call: EngineCall) -> AsyncGenerator[CompletionChunk, None]:
        until = self._until()
        begun = False
        while True:
            try:
                async with aclosing(super().generate_stream(call)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except InvalidRequest as error:
                if begun:
                    raise
                await self._load_again(call, error, until)

    def _until(self) -> float:
        """Return the time up to which other requests may take the place of a request's adapter."""
        return asyncio.get_running_loop().time() + self.engine.config.timeouts.control

    async def _load_again(self, call: EngineCall, error: InvalidRequest, until: float) -> None:
        """Load the request's adapter if it was unloaded before the engine had the request.

        Raises:
            InvalidRequest: The engine has refused the request for another reason, or the adapter is gone.
            EngineBusy: Other requests have taken the adapter's place again and again, for as long as a control call
                may take.
        """
        if call.lora is None or error.field != "lora":
            raise error
        if asyncio.get_running_loop().time() > until:
            raise EngineBusy(
                f"requests for other adapters took the place of {call.lora!r} again and again; raise max_loras"
            ) from error
        await self._require_adapter(call.lora)
