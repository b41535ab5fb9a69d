"""Weight updates: half of one, another one, too early, never ended."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult
from drivetrain.backend.toolkit.translation import non_finite_logits
from drivetrain.engine.controller import Controller
from drivetrain.engine.parts import PartKinds
from drivetrain.engine.served_weights import ServedWeights
from drivetrain.engine.states import WeightState
from drivetrain.engine.weight_transaction import WeightTransaction
from drivetrain.engine.weight_updates import WeightUpdates
from drivetrain.errors import DrivetrainError, InvalidWeights, NonFiniteLogits, WeightPlanMismatch
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import FinishReason, VersionSpan
from drivetrain.types.weights import (
    AbortUpdate,
    CommitUpdate,
    DiskSource,
    LoadBuckets,
    PrepareUpdate,
    TensorData,
    VerifyUpdate,
    WeightMessage,
    WeightReply,
    WeightUpdateRequest,
)
from drivetrain_conformance.assets.weight_sources import tensors_of
from drivetrain_conformance.mutants.registry import spoiled_backend, spoiled_part
from drivetrain_conformance.mutants.spoil import SoundBackend, answering, mixed

# What is loaded ------------------------------------------------------------------------------------------------------


class _Unverified(SoundBackend):
    """Commits what its engine does not: it withdraws the update there, and labels what lies in memory."""

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        match message:
            case VerifyUpdate():
                return WeightReply()
            case CommitUpdate(version):
                await super().receive_weights(AbortUpdate())
                await super().set_weight_version(version)
                return WeightReply()
            case _:
                return await super().receive_weights(message)


@spoiled_backend(caught_by="weight_sync/tensors_read_back_are_those_that_were_pushed", says="is not what was pushed")
def serves_half_an_update(backend: type[Backend]) -> type[Backend]:
    """The last bucket is not loaded, and verification finds nothing."""

    class Wrong(_Unverified):
        """Is one short, and does not look."""

        async def receive_weights(self, message: WeightMessage) -> WeightReply:
            match message:
                case PrepareUpdate():
                    reply = await super().receive_weights(message)
                    self._last = reply.buckets - 1
                    return reply
                case LoadBuckets(indices):
                    return await super().receive_weights(LoadBuckets(tuple(i for i in indices if i != self._last)))
                case _:
                    return await super().receive_weights(message)

    return mixed(backend, Wrong)


@spoiled_backend(
    caught_by="weight_sync/what_arrives_otherwise_than_sent_is_found",
    says="a tensor that is not what was sent was accepted",
)
def accepts_wrong_digests(backend: type[Backend]) -> type[Backend]:
    """Received tensors are not compared with the sender's digests."""
    return mixed(backend, _Unverified)


def _waving_through(backend: type[Backend], *errors: type[DrivetrainError]) -> type[Backend]:
    """A backend that acknowledges the updates which its engine refuses with these errors."""

    class Wrong(SoundBackend):
        """Logs the error, and goes on."""

        waves = False

        async def receive_weights(self, message: WeightMessage) -> WeightReply:
            if isinstance(message, PrepareUpdate):
                self.waves = False
                try:
                    return await super().receive_weights(message)
                except errors:
                    self.waves = True
            if not self.waves:
                return await super().receive_weights(message)
            if isinstance(message, CommitUpdate):
                await super().set_weight_version(message.version)
            return WeightReply()

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="weight_sync/a_wrong_checkpoint_is_refused_by_name", says="a missing tensor was accepted")
def accepts_an_incomplete_update(backend: type[Backend]) -> type[Backend]:
    """An update that lacks a tensor is committed."""
    return _waving_through(backend, WeightPlanMismatch)


@spoiled_backend(caught_by="weight_sync/a_wrong_checkpoint_is_refused_by_name", says="a tensor with a NaN was accepted")
def accepts_nan(backend: type[Backend]) -> type[Backend]:
    """A checkpoint that holds NaN is committed."""
    return _waving_through(backend, InvalidWeights)


@spoiled_backend(caught_by="weight_sync/a_checkpoint_folder_is_served", says="bfloat16")
def refuses_narrower_floats(backend: type[Backend]) -> type[Backend]:
    """A folder in bfloat16 is refused where the engine holds float32, though nothing would be rounded."""

    class Wrong(SoundBackend):
        """Wants the very dtype."""

        async def receive_weights(self, message: WeightMessage) -> WeightReply:
            if isinstance(message, PrepareUpdate) and isinstance(message.request.source, DiskSource):
                held = {spec.name: spec.dtype for spec in (await self.weight_manifest()).tensors}
                for name, tensor in tensors_of(Path(message.request.source.path)).items():
                    if name in held and f"torch.{held[name]}" != str(tensor.dtype):
                        raise WeightPlanMismatch(f"{name} is {tensor.dtype}", mismatched=[name])
            return await super().receive_weights(message)

    return mixed(backend, Wrong)


@spoiled_backend(
    caught_by="weight_sync/going_back_to_earlier_weights_gives_their_answers", says="nats below the most likely one"
)
def updates_nothing(backend: type[Backend]) -> type[Backend]:
    """An update is acknowledged step by step, and its version published; the weights stay what they were."""

    class Wrong(SoundBackend):
        """Loads into a copy that nobody uses."""

        async def receive_weights(self, message: WeightMessage) -> WeightReply:
            match message:
                case PrepareUpdate():
                    return await super().receive_weights(message)
                case CommitUpdate(version):
                    await super().set_weight_version(version)
            return WeightReply()

    return mixed(backend, Wrong)


@spoiled_backend(
    caught_by="weight_sync/going_back_to_earlier_weights_gives_their_answers",
    says="expected NonFiniteLogits, but nothing was raised",
)
def answers_nan_with_a_token(backend: type[Backend]) -> type[Backend]:
    """NaN logits end a request by its length, with one id, as the largest of NaN was found to be."""

    class Wrong(SoundBackend):
        """Takes the first id for the likeliest."""

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            try:
                return await super().generate(request)
            except NonFiniteLogits:
                return GenerateResult([0], FinishReason.LENGTH, [VersionSpan("diverged", 0, 1)])

    return mixed(backend, Wrong)


@spoiled_backend(
    caught_by="weight_sync/going_back_to_earlier_weights_gives_their_answers", says="the model gave NaN or infinite"
)
def meets_nan_of_older_weights(backend: type[Backend]) -> type[Backend]:
    """Once logits were NaN, longer prompts meet what is left of it in the cache, under any weights."""

    class Wrong(SoundBackend):
        """Hands blocks out again as they are."""

        unclean = False

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            try:
                result = await super().generate(request)
            except NonFiniteLogits:
                self.unclean = True
                raise
            if self.unclean and len(request.prompt_token_ids) > 16:
                raise non_finite_logits(request, 0)
            return result

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="weight_sync/no_prefix_of_older_weights_is_used", says="assert after.cached_tokens == 0")
def uses_stale_prefixes(backend: type[Backend]) -> type[Backend]:
    """Cache entries made by older weights are used after an update."""

    class Wrong(SoundBackend):
        """Resets nothing."""

        async def reset_prefix_cache(self) -> None:
            pass

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="weight_sync/tensors_read_back_are_those_that_were_pushed", says="is not what was pushed")
def reads_old_tensors(backend: type[Backend]) -> type[Backend]:
    """A tensor that was read once is returned as it was then."""

    class Wrong(SoundBackend):
        """Has a cache."""

        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            self._read: dict[str, TensorData] = {}

        async def read_weight(self, name: str) -> TensorData:
            if name not in self._read:
                self._read[name] = await super().read_weight(name)
            return self._read[name]

    return mixed(backend, Wrong)


# Versions ------------------------------------------------------------------------------------------------------------


@spoiled_backend(
    caught_by="weight_sync/a_new_label_divides_what_is_in_flight",
    says="the spans are (VersionSpan(version='renamed', start=0, end=",
)
def labels_all_tokens_with_the_last_version(backend: type[Backend]) -> type[Backend]:
    """Tokens made before an update are said to be made by the weights after it."""

    def change(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        spans = [VersionSpan(span.version, 0, span.end) for span in result.weight_versions[-1:]]
        return dataclasses.replace(result, weight_versions=spans)

    return answering(backend, change)


@spoiled_backend(
    caught_by="weight_sync/a_new_label_divides_what_is_in_flight",
    says="the spans are (VersionSpan(version='initial', start=0, end=",
)
def labels_all_tokens_with_the_first_version(backend: type[Backend]) -> type[Backend]:
    """Tokens made after an update are said to be made by the weights before it."""

    def change(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        count = len(result.token_ids)
        spans = [VersionSpan(span.version, 0, count) for span in result.weight_versions[:1]]
        return dataclasses.replace(result, weight_versions=spans)

    return answering(backend, change)


@spoiled_backend(
    caught_by="weight_sync/a_new_label_changes_no_answer", says="the spans are (VersionSpan(version='initial', start=0"
)
def labels_tokens_with_no_new_version(backend: type[Backend]) -> type[Backend]:
    """A new label of the weights does not reach the tokens."""

    class Wrong(SoundBackend):
        """Takes the label and drops it."""

        async def set_weight_version(self, version: str) -> None:
            pass

    return mixed(backend, Wrong)


@spoiled_part(
    caught_by="weight_sync/a_version_is_published_at_commit", says="assert engine.get_weight_version() == version"
)
def publishes_before_commit(parts: PartKinds) -> PartKinds:
    """The version is the new one from the beginning of an update."""

    class Wrong(WeightUpdates):
        """Is early."""

        @asynccontextmanager
        async def update(
            self, request: WeightUpdateRequest, *, at_once: bool = False
        ) -> AsyncGenerator[WeightTransaction, None]:
            async with super().update(request, at_once=at_once) as transaction:
                before = self.weights.version
                self.weights.publish(request.version)
                try:
                    yield transaction
                except BaseException:
                    self.weights.publish(before)
                    raise

    return dataclasses.replace(parts, updates=mixed(parts.updates, Wrong))


@spoiled_part(
    caught_by="weight_sync/an_update_that_breaks_off_leaves_the_engine_dirty",
    says="a version was published whose weights are not there",
)
def publishes_what_failed(parts: PartKinds) -> PartKinds:
    """A failed update leaves its version published."""

    class Wrong(WeightUpdates):
        """Publishes in any case."""

        @asynccontextmanager
        async def update(
            self, request: WeightUpdateRequest, *, at_once: bool = False
        ) -> AsyncGenerator[WeightTransaction, None]:
            begun = False
            try:
                async with super().update(request, at_once=at_once) as transaction:
                    begun = True
                    yield transaction
            finally:
                if begun:
                    self.weights.publish(request.version)

    return dataclasses.replace(parts, updates=mixed(parts.updates, Wrong))


# States --------------------------------------------------------------------------------------------------------------


@spoiled_part(caught_by="weight_sync/an_update_that_breaks_off_leaves_the_engine_dirty", says="it is ready, not dirty")
def serves_after_a_failed_update(parts: PartKinds) -> PartKinds:
    """After an update that broke on its way it is ready, with weights of both."""

    class Wrong(WeightUpdates):
        """Is back where it was."""

        @asynccontextmanager
        async def update(
            self, request: WeightUpdateRequest, *, at_once: bool = False
        ) -> AsyncGenerator[WeightTransaction, None]:
            try:
                async with super().update(request, at_once=at_once) as transaction:
                    yield transaction
            finally:
                status = self.controller.status
                self.controller.move_to(dataclasses.replace(status, weights=WeightState.CLEAN, why=""))

    return dataclasses.replace(parts, updates=mixed(parts.updates, Wrong))


@spoiled_part(caught_by="weight_sync/going_back_to_earlier_weights_gives_their_answers", says="it is paused, not ready")
def stays_paused_after_an_update(parts: PartKinds) -> PartKinds:
    """An update pauses, and does not go on."""

    class Wrong(WeightUpdates):
        """Leaves that to its caller."""

        @asynccontextmanager
        async def update(
            self, request: WeightUpdateRequest, *, at_once: bool = False
        ) -> AsyncGenerator[WeightTransaction, None]:
            async with super().update(request, at_once=at_once) as transaction:
                yield transaction
            await self.pauses.pause(PauseMode.WAIT, None)

    return dataclasses.replace(parts, updates=mixed(parts.updates, Wrong))


@spoiled_part(caught_by="weight_sync/an_update_while_paused_leaves_the_engine_paused", says="it is ready, not paused")
def ends_a_pause_by_an_update(parts: PartKinds) -> PartKinds:
    """An update lets requests go on, though the engine was paused before it."""

    class Wrong(WeightUpdates):
        """Always goes on."""

        @asynccontextmanager
        async def update(
            self, request: WeightUpdateRequest, *, at_once: bool = False
        ) -> AsyncGenerator[WeightTransaction, None]:
            async with super().update(request, at_once=at_once) as transaction:
                yield transaction
            await self.pauses.resume()

    return dataclasses.replace(parts, updates=mixed(parts.updates, Wrong))


@spoiled_part(
    caught_by="weight_sync/retracted_requests_go_on_with_the_new_weights",
    says="the spans are (VersionSpan(version='initial', start=0",
)
def aborts_requests_to_update(parts: PartKinds) -> PartKinds:
    """An update that should only freeze requests ends them."""

    class Wrong(WeightUpdates):
        """Knows one way."""

        async def quiesce(self, mode: PauseMode, *, later: bool = False) -> PauseMode | None:
            return await super().quiesce(PauseMode.ABORT)

    return dataclasses.replace(parts, updates=mixed(parts.updates, Wrong))


# Saving --------------------------------------------------------------------------------------------------------------


@spoiled_backend(caught_by="lifecycle/what_is_saved_is_what_is_served", says="is not what was served")
def saves_the_folder_it_was_loaded_from(backend: type[Backend]) -> type[Backend]:
    """A save copies the model's folder, whatever was pushed since."""

    class Wrong(SoundBackend):
        """Knows where there is a model."""

        async def save_sharded(self, path: str) -> None:
            await asyncio.to_thread(shutil.copytree, self.config.model, path, dirs_exist_ok=True)

    return mixed(backend, Wrong)


@spoiled_backend(
    caught_by="lifecycle/nothing_is_saved_where_something_is", says="a folder with a file in it was saved to"
)
def saves_over_what_is_there(backend: type[Backend]) -> type[Backend]:
    """A folder that holds something is emptied first."""

    class Wrong(SoundBackend):
        """Makes room."""

        async def save_sharded(self, path: str) -> None:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            await super().save_sharded(path)

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="lifecycle/requests_run_on_during_a_save", says="chunks came during the save")
def freezes_requests_to_save(backend: type[Backend]) -> type[Backend]:
    """Requests stand still while weights are saved."""

    class Wrong(SoundBackend):
        """Is careful."""

        async def save_sharded(self, path: str) -> None:
            await self.freeze(PauseMode.IN_PLACE)
            try:
                await super().save_sharded(path)
            finally:
                await self.unfreeze()

    return mixed(backend, Wrong)


@spoiled_part(
    caught_by="lifecycle/weights_that_are_lost_are_not_saved",
    says="an engine that is dirty did what it was asked to do",
)
def saves_weights_that_are_lost(parts: PartKinds) -> PartKinds:
    """Weights can be saved although a sleep has discarded them."""

    class Wrong(ServedWeights):
        """Looks whether there is memory, and no further."""

        async def save(
            self, action: str, place: str, timeout: float | None, save: Callable[[str], Awaitable[None]]
        ) -> None:
            if MemoryTag.WEIGHTS in self.controller.status.asleep:
                self.controller.status.require_weights(action)
            await save(place)

    return dataclasses.replace(parts, weights=mixed(parts.weights, Wrong))


@spoiled_part(caught_by="lifecycle/an_update_waits_for_a_save", says="the update did not wait for the saves")
def updates_while_it_saves(parts: PartKinds) -> PartKinds:
    """An update begins while weights are being saved."""

    class Wrong(Controller):
        """Saves wait for each other alone."""

        @asynccontextmanager
        async def owning_weights(self, action: str) -> AsyncGenerator[None, None]:
            async with nullcontext() if action == "a weight update" else super().owning_weights(action):
                yield

    return dataclasses.replace(parts, controller=mixed(parts.controller, Wrong))
