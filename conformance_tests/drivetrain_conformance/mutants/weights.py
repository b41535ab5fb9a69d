"""Weight updates: half of one, another one, too early, never ended."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import socket
import tempfile
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from drivetrain.backend.base import GenerateRequest, GenerateResult
from drivetrain.backend.toolkit.translation import non_finite_logits
from drivetrain.engine.controller import Controller
from drivetrain.engine.served_weights import ServedWeights
from drivetrain.engine.states import WeightState
from drivetrain.engine.weight_transaction import WeightTransaction
from drivetrain.engine.weight_updates import WeightUpdates
from drivetrain.errors import (
    DrivetrainError,
    EngineInternalError,
    EngineStateError,
    InvalidWeights,
    NonFiniteLogits,
    WeightBaseMismatch,
    WeightPlanMismatch,
    WeightVerifyFailed,
)
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain.types.outputs import FinishReason, VersionSpan
from drivetrain.types.weights import (
    AbortUpdate,
    ApplyUpdate,
    BeginUpdate,
    CommitUpdate,
    CommunicatorSpec,
    DiskSource,
    LoadBuckets,
    PluginSource,
    PrepareUpdate,
    TensorData,
    VerifyUpdate,
    WeightManifest,
    WeightMessage,
    WeightReply,
    WeightReport,
    WeightUpdateRequest,
)
from drivetrain_conformance.assets.weight_sources import tensors_of, write_checkpoint
from drivetrain_conformance.mutants.registry import mutant
from drivetrain_conformance.mutants.spoil import CorrectBackend, KnowingRequests, KnowingSleep, own, result_mutant

# Loaded values -------------------------------------------------------------------------------------------------------


@mutant("weight_sync/what_arrives_otherwise_than_sent_is_found", says="a tensor that is not what was sent (")
class accepts_wrong_digests(CorrectBackend):
    """Received tensors are not compared with those that were sent."""

    # The engine withdraws the update; the tensors that were loaded get the new version.
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


@mutant("weight_sync/what_arrives_otherwise_than_sent_is_found", says="not what was sent (model.layers")
class accepts_wrong_digests_of_norms(CorrectBackend):
    """Only matrices are compared with those that were sent."""

    waves = False

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        if isinstance(message, CommitUpdate) and self.waves:
            self.waves = False
            await super().receive_weights(AbortUpdate())
            await super().set_weight_version(message.version)
            return WeightReply()
        try:
            return await super().receive_weights(message)
        except WeightVerifyFailed as error:
            shapes = {spec.name: spec.shape for spec in (await super().weight_manifest()).tensors}
            if any(len(shapes[name]) > 1 for name in error.tensors):
                raise
            self.waves = True
            return WeightReply()


@mutant("weight_sync/tensors_read_back_are_those_that_were_pushed", says="is not what was pushed")
class serves_half_an_update(accepts_wrong_digests):
    """The last bucket is not loaded, and verification finds nothing."""

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


class _WavingThrough(CorrectBackend):
    """A backend that acknowledges the updates which its engine refuses with one kind of error."""

    error: type[DrivetrainError]
    waves = False

    def ignores(self, error: DrivetrainError) -> bool:
        """Return whether an update is acknowledged in spite of this error."""
        return True

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        if isinstance(message, PrepareUpdate):
            self.waves = False
            try:
                return await super().receive_weights(message)
            except self.error as error:
                if not self.ignores(error):
                    raise
                self.waves = True
        if not self.waves:
            return await super().receive_weights(message)
        if isinstance(message, CommitUpdate):
            await super().set_weight_version(message.version)
        return WeightReply()


@mutant("weight_sync/a_wrong_checkpoint_is_refused_by_name", says="a missing tensor was accepted")
class accepts_an_incomplete_update(_WavingThrough):
    """An update that lacks a tensor is committed."""

    error = WeightPlanMismatch


@mutant("weight_sync/a_wrong_checkpoint_is_refused_by_name", says="a tensor with a NaN was accepted")
class accepts_nan(_WavingThrough):
    """A checkpoint that holds NaN is committed."""

    error = InvalidWeights


@mutant("weight_sync/a_wrong_checkpoint_is_refused_by_name", says="a tensor of another dtype was accepted")
class rounds_without_being_asked(_WavingThrough):
    """A checkpoint in float64 is committed, rounded to the engine's dtype."""

    error = WeightPlanMismatch

    def ignores(self, error: DrivetrainError) -> bool:
        return "float64" in str(error)


@mutant("weight_sync/a_wrong_checkpoint_is_refused_by_name", says="the message does not say 'would round'")
class refuses_to_round_without_saying_so(CorrectBackend):
    """A tensor that the engine would have to round is refused as one that does not fit."""

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        try:
            return await super().receive_weights(message)
        except WeightPlanMismatch as error:
            if "would round" not in str(error):
                raise
            (name,) = error.mismatched
            raise WeightPlanMismatch(f"{name} does not fit", mismatched=[name]) from error


@mutant("weight_sync/a_checkpoint_folder_is_served", says="bfloat16")
class refuses_narrower_floats(CorrectBackend):
    """A folder in bfloat16 is refused where the engine holds float32, though nothing would be rounded."""

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        if isinstance(message, PrepareUpdate) and isinstance(message.request.source, DiskSource):
            held = {spec.name: spec.dtype for spec in (await self.weight_manifest()).tensors}
            for name, tensor in tensors_of(Path(message.request.source.path)).items():
                if name in held and f"torch.{held[name]}" != str(tensor.dtype):
                    raise WeightPlanMismatch(f"{name} is {tensor.dtype}", mismatched=[name])
        return await super().receive_weights(message)


@mutant("weight_sync/only_what_changed_is_pushed", says="of two pushes one sent all tensors")
class takes_every_other_delta(CorrectBackend):
    """Weights cannot be read back, and the base of every other delta is not the engine's."""

    deltas = 0

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return super().capabilities(config) - {Capability.READ_WEIGHTS}

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        source = message.request.source if isinstance(message, PrepareUpdate) else None
        if isinstance(source, PluginSource) and source.data.get("base") is not None:
            self.deltas += 1
            if self.deltas % 2:
                raise WeightBaseMismatch("the delta's base is not the engine's last update")
        return await super().receive_weights(message)


@mutant("weight_sync/going_back_to_earlier_weights_gives_their_answers", says="nats below the most likely one")
class updates_nothing(CorrectBackend):
    """An update is acknowledged step by step, and its version published; the weights do not change."""

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        match message:
            case PrepareUpdate():
                return await super().receive_weights(message)
            case CommitUpdate(version):
                await super().set_weight_version(version)
        return WeightReply()


@mutant(
    "weight_sync/going_back_to_earlier_weights_gives_their_answers",
    says="expected NonFiniteLogits, but nothing was raised",
)
class answers_nan_with_a_token(CorrectBackend):
    """NaN logits end a request with one token, id 0, and finish reason length."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        try:
            return await super().generate(request)
        except NonFiniteLogits:
            return GenerateResult([0], FinishReason.LENGTH, [VersionSpan("diverged", 0, 1)])


@mutant("weight_sync/going_back_to_earlier_weights_gives_their_answers", says="the model gave NaN or infinite")
class meets_nan_of_older_weights(CorrectBackend):
    """Once logits were NaN, NaN in the cache fails longer prompts, also after an update to good weights."""

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


@mutant("weight_sync/no_prefix_of_older_weights_is_used", says="assert after.cached_tokens == 0")
class uses_stale_prefixes(CorrectBackend):
    """Cache entries made by older weights are used after an update."""

    async def reset_prefix_cache(self) -> None:
        pass


@mutant("pause/a_reset_of_the_prefix_cache_spares_frozen_requests", says="tokens of an earlier prompt were found")
class resets_prefixes_only_while_idle(KnowingRequests):
    """Cached prefixes survive a reset while requests are in flight."""

    async def reset_prefix_cache(self) -> None:
        if not self.flying:
            await super().reset_prefix_cache()


@mutant("weight_sync/a_frozen_request_leaves_no_stale_prefix", says="tokens were found that older weights had cached")
class keeps_prefixes_of_older_weights_while_requests_run(resets_prefixes_only_while_idle):
    """An update with requests in flight leaves prefixes that the older weights cached."""


@mutant("weight_sync/a_frozen_request_leaves_no_stale_prefix", says="tokens were found that older weights had cached")
class finds_prefixes_of_the_time_of_its_arrival(CorrectBackend):
    """A request that waits in the engine through an update finds the prefixes that the older weights cached."""

    applied = 0

    async def apply_weights(self, update: ApplyUpdate) -> WeightReply:
        reply = await super().apply_weights(update)
        self.applied += 1
        return reply

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        before = self.applied
        result = await super().generate(request)
        if self.applied == before or len(result.weight_versions) > 1:
            return result
        return dataclasses.replace(result, cached_tokens=len(request.prompt_token_ids) // 2)


@mutant("weight_sync/a_frozen_request_leaves_no_stale_prefix", says="nats from that of the model in")
class keeps_the_cache_of_retracted_requests(CorrectBackend):
    """Requests that a pause retracts go on with the cache that older weights made."""

    async def freeze(self, mode: PauseMode) -> None:
        await super().freeze(PauseMode.IN_PLACE if mode is PauseMode.RETRACT else mode)


@mutant("weight_sync/a_tensor_of_zeros_is_reported", says="NaN is reported in (), infinity in ()")
class overlooks_infinity(CorrectBackend):
    """validate_weights() reports NaN, and no infinity."""

    async def validate_weights(self) -> WeightReport:
        return dataclasses.replace(await super().validate_weights(), infinite=())


@mutant("lifecycle/requests_run_on_during_a_save", says="tokens came while an update was staged")
class stands_still_while_it_prepares(CorrectBackend):
    """Requests make no token while the source of an update is opened."""

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        if not isinstance(message, PrepareUpdate):
            return await super().receive_weights(message)
        await super().freeze(PauseMode.IN_PLACE)
        try:
            return await super().receive_weights(message)
        finally:
            await super().unfreeze()


@mutant("weight_sync/tensors_read_back_are_those_that_were_pushed", says="is not what was pushed")
class reads_old_tensors(CorrectBackend):
    """A tensor that was read once is returned with its old values later."""

    _read: dict[str, TensorData] = own(dict)

    async def read_weight(self, name: str) -> TensorData:
        if name not in self._read:
            self._read[name] = await super().read_weight(name)
        return self._read[name]


@mutant("weight_sync/tensors_read_back_are_those_that_were_pushed", says="is not what was pushed")
class leaves_what_is_nearly_equal(CorrectBackend):
    """An update leaves a tensor as it was if no value would change by more than a hundred-thousandth."""

    _left: dict[str, TensorData] = own(dict)

    async def read_weight(self, name: str) -> TensorData:
        read = await super().read_weight(name)
        if name not in self._left or not np.allclose(_numbers(self._left[name]), _numbers(read), rtol=1e-5):
            self._left[name] = read
        return self._left[name]


def _numbers(tensor: TensorData) -> NDArray[np.float32]:
    return np.frombuffer(tensor.data, dtype=np.float32)


class _ChangingAfterUpdates(CorrectBackend):
    """A backend whose engine changes the weights of one architecture after each update."""

    architecture: str

    @abstractmethod
    def changed(self, name: str, pushed: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Return the tensor to serve in place of a pushed one; ``first`` is the engine's initial tensor."""

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        reply = await super().receive_weights(message)
        if isinstance(message, CommitUpdate) and self.architecture in self.config.model:
            with tempfile.TemporaryDirectory() as folder:
                await self._change(Path(folder), message.version)
        return reply

    async def _change(self, folder: Path, version: str) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name, first in tensors_of(Path(self.config.model)).items():
            read = torch.frombuffer(bytearray((await self.read_weight(name)).data), dtype=first.dtype)
            tensors[name] = self.changed(name, read.view(first.shape), first)
        source = DiskSource(path=str(write_checkpoint(folder, Path(self.config.model), tensors)))
        request = WeightUpdateRequest(version=version, source=source)
        buckets = (await super().receive_weights(PrepareUpdate(request))).buckets
        for step in (BeginUpdate(), LoadBuckets(tuple(range(buckets))), VerifyUpdate(), CommitUpdate(version)):
            await super().receive_weights(step)


@mutant("weight_sync/tied_weights_are_pushed_once_and_used_twice", says="nats below the most likely one")
class turns_square_matrices_of_gpt2(_ChangingAfterUpdates):
    """Square matrices of gpt2, whose checkpoints hold them transposed, are turned once more after an update."""

    architecture = "gpt2"

    def changed(self, name: str, pushed: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return pushed.T if pushed.ndim > 1 and pushed.shape[0] == pushed.shape[1] else pushed


@mutant("weight_sync/tied_weights_are_pushed_once_and_used_twice", says="nats below the most likely one")
class keeps_what_it_computed_of_older_weights(_ChangingAfterUpdates):
    """The halves of DeepSeek's projection, which an engine computes when it loads, keep the first weights' values."""

    architecture = "deepseek"

    def changed(self, name: str, pushed: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return first if "kv_b_proj" in name else pushed


@mutant("weight_sync/tied_weights_are_pushed_once_and_used_twice", says="it is not seen what the model has of it")
class refuses_what_its_loader_computes(CorrectBackend):
    """Updates of DeepSeek are refused, as the engine's loader computes something of a tensor."""

    async def receive_weights(self, message: WeightMessage) -> WeightReply:
        if isinstance(message, PrepareUpdate) and "deepseek" in self.config.model:
            raise WeightPlanMismatch(
                "the loader computes something of kv_b_proj; it is not seen what the model has of it"
            )
        return await super().receive_weights(message)


@mutant("weight_sync/a_group_is_formed_once_and_left_once", says="other hosts can connect to")
class listens_everywhere_for_a_group(CorrectBackend):
    """While a broadcast group at a loopback address lives, the engine listens on every interface."""

    _stores: dict[str, socket.socket] = own(dict)

    async def init_communicator(self, spec: CommunicatorSpec) -> None:
        await super().init_communicator(spec)
        self._stores[spec.group_name] = socket.create_server(("", 0))

    async def destroy_communicator(self, group_name: str) -> None:
        await super().destroy_communicator(group_name)
        self._stores.pop(group_name).close()


# Versions ------------------------------------------------------------------------------------------------------------


@result_mutant(
    "weight_sync/a_new_label_divides_what_is_in_flight",
    says="the spans are (VersionSpan(version='renamed', start=0, end=",
)
def labels_all_tokens_with_the_last_version(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """Tokens made before an update are said to be made by the weights after it."""
    spans = [VersionSpan(span.version, 0, span.end) for span in result.weight_versions[-1:]]
    return dataclasses.replace(result, weight_versions=spans)


@result_mutant(
    "weight_sync/a_new_label_divides_what_is_in_flight",
    says="the spans are (VersionSpan(version='initial', start=0, end=",
)
def labels_all_tokens_with_the_first_version(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    """Tokens made after an update are said to be made by the weights before it."""
    count = len(result.token_ids)
    spans = [VersionSpan(span.version, 0, count) for span in result.weight_versions[:1]]
    return dataclasses.replace(result, weight_versions=spans)


@mutant("weight_sync/a_new_label_changes_no_answer", says="the spans are (VersionSpan(version='initial', start=0")
class labels_tokens_with_no_new_version(CorrectBackend):
    """A new label of the weights does not reach the tokens."""

    async def set_weight_version(self, version: str) -> None:
        pass


@mutant("weight_sync/a_version_is_published_at_commit", says="assert engine.get_weight_version() == version")
class publishes_before_commit(WeightUpdates):
    """The version is the new one from the beginning of an update."""

    @asynccontextmanager
    async def update(self, request: WeightUpdateRequest, **options: bool) -> AsyncGenerator[WeightTransaction, None]:
        async with super().update(request, **options) as transaction:
            before = self.weights.version
            self.weights.publish(request.version)
            try:
                yield transaction
            except BaseException:
                self.weights.publish(before)
                raise


@mutant(
    "weight_sync/an_update_that_breaks_off_leaves_the_engine_dirty",
    says="a version was published whose weights are not there",
)
class publishes_what_failed(WeightUpdates):
    """A failed update leaves its version published."""

    @asynccontextmanager
    async def update(self, request: WeightUpdateRequest, **options: bool) -> AsyncGenerator[WeightTransaction, None]:
        begun = False
        try:
            async with super().update(request, **options) as transaction:
                begun = True
                yield transaction
        finally:
            if begun:
                self.weights.publish(request.version)


# States --------------------------------------------------------------------------------------------------------------


@mutant("weight_sync/an_update_that_breaks_off_leaves_the_engine_dirty", says="it is ready, not dirty")
class serves_after_a_failed_update(WeightUpdates):
    """After an update that broke on its way it is ready, with weights of both."""

    @asynccontextmanager
    async def update(self, request: WeightUpdateRequest, **options: bool) -> AsyncGenerator[WeightTransaction, None]:
        try:
            async with super().update(request, **options) as transaction:
                yield transaction
        finally:
            status = self.controller.status
            self.controller.move_to(dataclasses.replace(status, weights=WeightState.CLEAN, why=""))


@mutant("weight_sync/going_back_to_earlier_weights_gives_their_answers", says="it is paused, not ready")
class stays_paused_after_an_update(WeightUpdates):
    """An update pauses, and does not go on."""

    @asynccontextmanager
    async def update(self, request: WeightUpdateRequest, **options: bool) -> AsyncGenerator[WeightTransaction, None]:
        async with super().update(request, **options) as transaction:
            yield transaction
        await self.pauses.pause(PauseMode.WAIT, None)


@mutant("weight_sync/an_update_while_paused_leaves_the_engine_paused", says="it is ready, not paused")
class ends_a_pause_by_an_update(WeightUpdates):
    """An update lets requests go on, though the engine was paused before it."""

    @asynccontextmanager
    async def update(self, request: WeightUpdateRequest, **options: bool) -> AsyncGenerator[WeightTransaction, None]:
        async with super().update(request, **options) as transaction:
            yield transaction
        await self.pauses.resume()


@mutant(
    "weight_sync/retracted_requests_go_on_with_the_new_weights",
    says="the spans are (VersionSpan(version='initial', start=0",
)
class aborts_requests_to_update(WeightUpdates):
    """An update that should only freeze requests ends them."""

    async def quiesce(self, mode: PauseMode, *, later: bool = False) -> PauseMode | None:
        return await super().quiesce(PauseMode.ABORT)


@mutant("weight_sync/weights_asleep_are_not_read", says="knows no tensors")
class knows_no_tensors_asleep(KnowingSleep):
    """While the weights sleep, their manifest is refused."""

    async def weight_manifest(self) -> WeightManifest:
        if self.weights_sleep:
            raise EngineStateError("asleep, it knows no tensors", state="asleep")
        return await super().weight_manifest()


# Saving --------------------------------------------------------------------------------------------------------------


@mutant("lifecycle/what_is_saved_is_what_is_served", says="is not what was served")
class saves_the_folder_it_was_loaded_from(CorrectBackend):
    """A save copies the model's folder instead of the pushed weights."""

    async def save_sharded(self, path: str) -> None:
        await asyncio.to_thread(shutil.copytree, self.config.model, path, dirs_exist_ok=True)


@mutant("lifecycle/what_is_saved_is_what_is_served", says="generation_config.json of the model's folder was not saved")
class saves_the_weights_and_a_configuration(CorrectBackend):
    """A saved folder lacks the generation config, which may name a further EOS."""

    async def save_sharded(self, path: str) -> None:
        await super().save_sharded(path)
        await asyncio.to_thread(Path(path, "generation_config.json").unlink)


@mutant("lifecycle/nothing_is_saved_where_something_is", says="a save on a full disk left")
class leaves_half_a_model_on_a_full_disk(CorrectBackend):
    """Files of a save that failed for want of room are left."""

    async def save_sharded(self, path: str) -> None:
        try:
            await super().save_sharded(path)
        except EngineInternalError:
            await asyncio.to_thread(shutil.copytree, self.config.model, path, copy_function=_copy_a_little)
            raise


def _copy_a_little(source: str, target: str) -> None:
    Path(target).write_bytes(Path(source).read_bytes()[:1000])


@mutant("lifecycle/nothing_is_saved_where_something_is", says="a model fits a full disk")
class takes_a_full_disk_for_a_saved_model(CorrectBackend):
    """A save that fails for want of room counts as done."""

    async def save_sharded(self, path: str) -> None:
        with suppress(EngineInternalError):
            await super().save_sharded(path)


@mutant("lifecycle/nothing_is_saved_where_something_is", says="a folder with a file in it was saved to")
class saves_over_what_is_there(CorrectBackend):
    """A folder that holds something is emptied first."""

    async def save_sharded(self, path: str) -> None:
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        await super().save_sharded(path)


@mutant("lifecycle/requests_run_on_during_a_save", says="chunks came during the save")
class freezes_requests_to_save(CorrectBackend):
    """Requests stand still while weights are saved."""

    async def save_sharded(self, path: str) -> None:
        await self.freeze(PauseMode.IN_PLACE)
        try:
            await super().save_sharded(path)
        finally:
            await self.unfreeze()


@mutant("lifecycle/weights_that_are_lost_are_not_saved", says="weights that are lost are saved")
class saves_weights_that_are_lost(ServedWeights):
    """Weights can be saved although a sleep has discarded them."""

    async def save(
        self, action: str, place: str, timeout: float | None, save: Callable[[str], Awaitable[None]]
    ) -> None:
        if MemoryTag.WEIGHTS in self.controller.status.asleep:
            self.controller.status.require_weights(action)
        await save(place)


@mutant("weight_sync/a_new_label_changes_no_answer", says="spans")
class labels_tokens_for_who_gave_up(ServedWeights):
    """A new version whose caller has left is not published, and completions carry it."""

    async def relabel(self, version: str) -> None:
        before = self.version
        try:
            await super().relabel(version)
        except asyncio.CancelledError:
            self.publish(before)
            raise


@mutant("lifecycle/an_update_waits_for_a_save", says="the update did not wait for the saves")
class updates_while_it_saves(Controller):
    """An update begins while weights are being saved."""

    @asynccontextmanager
    async def owning_weights(self, action: str) -> AsyncGenerator[None, None]:
        async with nullcontext() if action == "a weight update" else super().owning_weights(action):
            yield
