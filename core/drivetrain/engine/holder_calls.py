"""The calls of one holder of an engine, and the cleanup when the holder is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from drivetrain.backend.base import EngineStats, GenerateRequest, GenerateResult, ReadMedium, TokenDelta
from drivetrain.backend.toolkit.deadlines import deadline
from drivetrain.engine.held_update import HeldUpdate
from drivetrain.engine.parts import Parts
from drivetrain.engine.samples import Sample, Samples
from drivetrain.engine.weight_transaction import WeightTransaction
from drivetrain.errors import DrivetrainError, EngineBusy, EngineStateError, WeightTransferFailed
from drivetrain.process.shared_engine import AppliedUpdate, SharedEngine
from drivetrain.text.tokenizer_files import read_tokenizer_files
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.prompts import MediaInput
from drivetrain.types.weights import (
    CommunicatorSpec,
    TensorData,
    WeightManifest,
    WeightReport,
    WeightUpdateRequest,
)

logger = logging.getLogger("drivetrain.engine")


class Claims:
    """The holders that prepared the newest update and that have one under way."""

    def __init__(self) -> None:
        self.prepared_by: HolderCalls | None = None
        self.updated_by: HolderCalls | None = None


class HolderCalls(SharedEngine):
    """Carries out the calls of one holder with the engine's parts.

    Args:
        name: The holder's name in messages.
        parts: The engine's parts.
        claims: The claims of all holders of the engine.
    """

    def __init__(self, name: str, parts: Parts, claims: Claims) -> None:
        self.name = name
        self.parts = parts
        self.claims = claims
        self._prepared: WeightUpdateRequest | None = None
        self._update: HeldUpdate | None = None
        self._transaction: WeightTransaction | None = None
        self._applying: set[asyncio.Task[AppliedUpdate]] = set()
        self._gone = asyncio.Event()
        self._taken = 0
        """Updates of this holder that have taken the weights and not released them: one is applied, others wait."""

    # Tokenizer ---------------------------------------------------------------------------------------------------

    async def tokenizer_files(self) -> dict[str, bytes]:
        return await asyncio.to_thread(read_tokenizer_files, self.parts.controller.config)

    # Generation --------------------------------------------------------------------------------------------------

    def _sample(self, request: GenerateRequest) -> Sample:
        self.parts.controller.require_admission("a request")
        if request.lora is not None:
            self.parts.loaded_adapters.require(request.lora, "lora")
        samples = Samples(request, 0, lambda _: request.seed, vocab_size=self.parts.model.info.vocab_size)
        if request.params.n > 1:
            samples.holders_request = request.request_id.rpartition("/")[0]
        return Sample(request, samples, 0)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        sample = self._sample(request)
        with self.parts.in_flight.under_way([sample.samples]):
            return await self.parts.in_flight.run(sample, match_text=False)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        sample = self._sample(request)
        with self.parts.in_flight.under_way([sample.samples]):
            async with aclosing(self.parts.in_flight.stream_steps(sample)) as steps:
                async for step in steps:
                    yield step

    async def read_media(self, media: tuple[MediaInput, ...]) -> list[ReadMedium]:
        return await self.parts.backend.read_media(media)

    async def abort_samples(self, request_ids: list[str]) -> None:
        async with self.parts.controller.bounded("the abort to reach the engine"):
            for request_id in request_ids:
                await self.parts.in_flight.abort(request_id)

    async def abort(self, request_id: str) -> None:
        await self.parts.generation.abort(request_id)

    async def abort_generation(self) -> None:
        await self.parts.generation.abort_all()

    # Pause and memory --------------------------------------------------------------------------------------------

    async def pause_generation(self, mode: PauseMode, timeout: float | None) -> None:
        await self.parts.pauses.pause(mode, timeout, by=self)

    async def continue_generation(self) -> None:
        await self.parts.pauses.resume()

    async def sleep(
        self, tags: frozenset[MemoryTag] | None, timeout: float | None, abort_first: bool, drain_timeout: float
    ) -> None:
        await self.parts.pauses.sleep(tags, timeout, abort_first, drain_timeout, by=self)

    async def wake_up(self, tags: frozenset[MemoryTag] | None, timeout: float | None) -> None:
        await self.parts.pauses.wake_up(tags, timeout)

    async def reset_prefix_cache(self) -> None:
        await self.parts.pauses.reset_prefix_cache()

    async def clear_hicache_storage(self) -> None:
        await self.parts.pauses.clear_hicache_storage()

    # Weights -----------------------------------------------------------------------------------------------------

    def _refuse_others_update(self) -> None:
        other = self.claims.updated_by
        if other is not None and other is not self:
            raise EngineBusy(
                f"a weight update of {other.name} is under way; one trainer updates an engine at a time. Wait until it "
                "has ended"
            )

    def _take(self, request: WeightUpdateRequest | None) -> WeightUpdateRequest:
        """Claim the weights for ``request``, or for the prepared update if it is None; return the update."""
        self._refuse_others_update()
        prepared, self._prepared = self._prepared, None
        newest, self.claims.prepared_by = self.claims.prepared_by, None
        if request is None:
            if prepared is None:
                raise EngineStateError("no update was prepared; prepare one, or give it", state="idle")
            if newest is not self:
                raise EngineBusy(
                    "another holder of the engine has prepared or made an update since this one was prepared; one "
                    "trainer updates an engine at a time. Prepare it again"
                )
        self.claims.updated_by = self
        self._taken += 1
        return request or prepared  # type: ignore[return-value]  # one of them is given

    def _release_weights(self) -> None:
        self._taken -= 1
        if not self._taken and self.claims.updated_by is self:
            self.claims.updated_by = None

    async def weight_manifest(self) -> WeightManifest:
        return await self.parts.weights.manifest()

    async def prepare_weight_update(self, request: WeightUpdateRequest) -> None:
        self._refuse_others_update()
        self._prepared = None
        await self.parts.updates.prepare(request)
        self._prepared, self.claims.prepared_by = request, self

    async def forget_weight_update(self) -> None:
        prepared, self._prepared = self._prepared, None
        if self.claims.prepared_by is self:
            self.claims.prepared_by = None
        if prepared is not None:
            await self.parts.updates.forget(prepared)

    async def apply_update(self, request: WeightUpdateRequest | None) -> AppliedUpdate:
        # In a task of its own: a holder that disconnects must not interrupt an update that is writing weights.
        applying = asyncio.ensure_future(self._apply(self._take(request)))
        self._applying.add(applying)
        applying.add_done_callback(self._applying.discard)
        try:
            return await asyncio.shield(applying)
        except asyncio.CancelledError:
            # A holder that has cancelled the call waits for its end; a holder that is gone does not.
            gone = asyncio.ensure_future(self._gone.wait())
            try:
                await asyncio.wait([applying, gone], return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
            raise

    async def _apply(self, request: WeightUpdateRequest) -> AppliedUpdate:
        try:
            async with self.parts.updates.update(request, at_once=True) as transaction:
                pass
            return AppliedUpdate(transaction.nbytes, transaction.paused_seconds)
        finally:
            self._release_weights()

    async def begin_update(self, request: WeightUpdateRequest | None) -> int:
        if self._update is not None:
            raise EngineBusy("an update that this holder began is under way; commit it or break it off first")
        update = HeldUpdate(self.parts.updates.update(self._take(request)))
        try:
            self._transaction = await update.begin()
        except BaseException:
            self._release_weights()
            raise
        self._update = update
        return self._transaction.buckets

    async def load_buckets(self, indices: list[int]) -> int:
        if self._transaction is None:
            raise EngineStateError("no update was begun; begin one first", state="idle")
        await self._transaction.load(indices)
        return self._transaction.nbytes

    async def commit_update(self) -> AppliedUpdate:
        update, transaction = self._update, self._transaction
        if update is None or transaction is None:
            raise EngineStateError("no update was begun; begin one first", state="idle")
        self._update = self._transaction = None
        try:
            await update.commit()
        finally:
            self._release_weights()
        return AppliedUpdate(transaction.nbytes, transaction.paused_seconds)

    async def break_off_update(self, reason: str) -> None:
        update, self._update, self._transaction = self._update, None, None
        if update is None:
            return
        try:
            await update.break_off(WeightTransferFailed(reason))
        finally:
            self._release_weights()

    async def release_weight_sources(self) -> None:
        await self.parts.updates.release_sources()

    async def update_adapter(self, request: WeightUpdateRequest) -> None:
        assert request.lora_name is not None
        await self.parts.adapters.update(request, request.lora_name)

    async def init_weight_update_communicator(self, spec: CommunicatorSpec) -> None:
        await self.parts.communicators.join(spec)

    async def destroy_weight_update_communicator(self, group_name: str) -> None:
        await self.parts.communicators.leave(group_name)

    async def update_weight_version(self, version: str) -> None:
        await self.parts.weights.relabel(version)

    async def get_weights_by_name(self, name: str) -> TensorData:
        return await self.parts.weights.read(name)

    async def validate_weights(self) -> WeightReport:
        return await self.parts.weights.validate()

    async def save_sharded_model(self, path: str, timeout: float | None) -> None:
        await self.parts.weights.save_sharded(path, timeout)

    async def save_remote_model(self, url: str, timeout: float | None) -> None:
        await self.parts.weights.save_remote(url, timeout)

    # Adapters ----------------------------------------------------------------------------------------------------

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        await self.parts.adapters.load(lora_name, lora_path, pinned)

    async def unload_lora_adapter(self, lora_name: str) -> None:
        await self.parts.adapters.unload(lora_name)

    # Models that do not generate ---------------------------------------------------------------------------------

    async def embed(self, prompts: list[list[int]], dimensions: int | None) -> list[list[float]]:
        self.parts.controller.require("encode()", Capability.EMBED)
        return await self.parts.pooling.embed(prompts, dimensions)

    async def reward_score(self, sequences: list[list[int]]) -> list[float]:
        self.parts.controller.require("score()", Capability.REWARD_SCORE)
        return await self.parts.pooling.reward_score(sequences)

    # Diagnostics -------------------------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        return await self.parts.diagnostics.stats()

    async def start_profile(self, directory: str) -> None:
        await self.parts.diagnostics.start_profile(directory)

    async def stop_profile(self) -> str:
        return await self.parts.diagnostics.stop_profile()

    # The end -----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Record that the holder is gone: its cancelled calls need not wait for an update that goes on."""
        self._gone.set()

    async def undo(self) -> None:
        """Free what a holder held that is gone; its calls were cancelled. Bounded by ``timeouts.control`` each."""
        seconds = self.parts.controller.config.timeouts.control
        for what, work in (
            ("its weight update to be broken off", self.break_off_update(f"{self.name}, which sent it, is gone")),
            ("its prepared weight update to be dropped", self.forget_weight_update()),
            ("its pause to be lifted", self.parts.pauses.drop_pause_of(self)),
            ("its sleep to be noted", self.parts.pauses.drop_sleep_of(self, self.name)),
        ):
            try:
                async with deadline(seconds, what):
                    await work
            except DrivetrainError as error:
                logger.warning("%s is gone: %s", self.name, error)
