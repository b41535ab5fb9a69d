"""LoRA adapters that are mixed up, ignored, read in part, or not unloaded."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.backend.toolkit.model_folder import config_levels, experts_of
from drivetrain.backend.toolkit.translation import non_finite_logits
from drivetrain.engine.adapters import Adapters
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.requests_in_flight import RequestsInFlight
from drivetrain.errors import EngineBusy, EngineStartError, InvalidRequest, NonFiniteLogits, TooManyAdapters
from drivetrain.types.outputs import FinishReason
from drivetrain.types.weights import (
    LoraTensors,
    WeightManifest,
    WeightUpdateRequest,
)
from drivetrain_conformance.assets.made_adapters import Adapter, change_adapter
from drivetrain_conformance.mutants.registry import backend_mutants, mixed, mutant
from drivetrain_conformance.mutants.spoil import (
    CorrectBackend,
    KnowingEos,
    KnowingRequests,
    after,
    fifos_in,
    joined,
    own,
    params_mutant,
    request_mutant,
    waits_in_open,
)

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]
    Change = Callable[[dict[str, object], Tensors], object]

# Choice of the adapter -----------------------------------------------------------------------------------------------


@request_mutant("lora/an_adapter_adds_its_product", says="nats below the most likely one")
def ignores_adapters(request: GenerateRequest) -> GenerateRequest:
    """Requests that name an adapter are answered by the model without it."""
    return dataclasses.replace(request, lora=None)


@mutant("lora/requests_in_flight_use_different_adapters", says="nats below the most likely one")
class uses_an_adapter_for_all(CorrectBackend):
    """Once an adapter was used, requests that name none are answered with it too."""

    active: str | None = None

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.active = request.lora or self.active
        return await super().generate(dataclasses.replace(request, lora=self.active))

    async def unload_lora_adapter(self, lora_name: str) -> None:
        self.active = None
        await super().unload_lora_adapter(lora_name)


@params_mutant("lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="begins no match of")
def drops_the_grammar_beside_an_adapter(request: GenerateRequest) -> Mapping[str, object]:
    """A request with an adapter is not held to its grammar."""
    return {"structured_output": None} if request.lora else {}


@params_mutant("lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="cannot be drawn by")
def drops_top_k_beside_an_adapter(request: GenerateRequest) -> Mapping[str, object]:
    """A request with an adapter ignores its top_k."""
    return {"top_k": 0} if request.lora else {}


@mutant("lora/an_adapter_in_use_is_not_unloaded", says="nats below the most likely one")
class loses_adapters_in_flight_when_another_comes(KnowingRequests):
    """Requests in flight continue without their adapter once another one is loaded."""

    _lost: set[str] = own(set)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        await super().load_lora_adapter(lora_name, lora_path, pinned)
        self._lost |= self.flying
        await self.abort(list(self.flying))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        first = await super().generate(request)
        if request.request_id not in self._lost or first.finish_reason is not FinishReason.ABORT:
            return first
        return joined(first, await super().generate(dataclasses.replace(after(request, first), lora=None)))


@mutant("lora/an_adapter_in_use_is_not_unloaded", says="the adapter is used by 2 requests that have ended")
class counts_aborted_requests_as_users(CorrectBackend):
    """A request that is aborted is counted as a user of its adapter forever."""

    _users: Counter[str] = own(Counter)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if request.lora is not None and result.finish_reason is FinishReason.ABORT:
            self._users[request.lora] += 1
        return result

    async def unload_lora_adapter(self, lora_name: str) -> None:
        if users := self._users[lora_name]:
            raise EngineBusy(f"the adapter is used by {users} requests that have ended")
        await super().unload_lora_adapter(lora_name)


@mutant("lora/requests_in_flight_use_different_adapters", says="nats below the most likely one")
class holds_five_adapters_at_once(CorrectBackend):
    """While requests of five adapters are in flight, those of a sixth are answered by the model without it."""

    _using: list[str] = own(list)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.lora is None or len({*self._using, request.lora}) > 5:
            return await super().generate(dataclasses.replace(request, lora=None))
        self._using.append(request.lora)
        try:
            return await super().generate(request)
        finally:
            self._using.remove(request.lora)


class _ByShortName(CorrectBackend):
    """Knows adapters by a part of their names: a request gets the first that was loaded of those that share it."""

    _loaded: list[str] = own(list)

    def short(self, name: str) -> str:
        """Return the part of the name that counts."""
        return name

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        await super().load_lora_adapter(lora_name, lora_path, pinned)
        self._loaded.append(lora_name)

    async def unload_lora_adapter(self, lora_name: str) -> None:
        await super().unload_lora_adapter(lora_name)
        self._loaded.remove(lora_name)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.lora is not None:
            alike = (name for name in self._loaded if self.short(name) == self.short(request.lora or ""))
            request = dataclasses.replace(request, lora=next(alike))
        return await super().generate(request)


@mutant("lora/requests_in_flight_use_different_adapters", says="nats below the most likely one")
class knows_adapters_by_the_beginning_of_their_names(_ByShortName):
    """Adapters whose names begin with the same 16 characters are taken for one."""

    def short(self, name: str) -> str:
        return name[:16]


@mutant("lora/requests_in_flight_use_different_adapters", says="nats below the most likely one")
class knows_adapters_in_lower_case(_ByShortName):
    """Adapters whose names differ in case are taken for one."""

    def short(self, name: str) -> str:
        return name.lower()


@mutant("lora/requests_in_flight_use_different_adapters", says="gave NaN or infinite logits")
class fails_the_whole_batch(CorrectBackend):
    """NaN logits of one request end all requests of the same step with its error."""

    failed = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        before = self.failed
        try:
            result = await super().generate(request)
        except NonFiniteLogits:
            self.failed += 1
            raise
        if self.failed > before:
            raise non_finite_logits(request, 0)
        return result


@mutant("lora/a_name_may_come_back_as_another_adapter", says=("nats below", "nats off that of the merged model"))
class reads_an_adapters_folder_once(CorrectBackend):
    """A folder that is loaded again is served with its first contents."""

    _copies: dict[str, tempfile.TemporaryDirectory[str]] = own(dict)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        if lora_path not in self._copies:
            self._copies[lora_path] = tempfile.TemporaryDirectory()
            shutil.copytree(lora_path, self._copies[lora_path].name, dirs_exist_ok=True)
        await super().load_lora_adapter(lora_name, self._copies[lora_path].name, pinned)


@mutant("lora/a_name_may_come_back_as_another_adapter", says="nats below")
class knows_adapters_by_slot(CorrectBackend):
    """The cache knows an adapter by one of eight slots, and takes a prompt for that of the slot's last adapter."""

    _loads = 0
    _known: dict[tuple[int, str], GenerateResult] = own(dict)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        await super().load_lora_adapter(lora_name, lora_path, pinned)
        self._loads += 1

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.lora is None:
            return await super().generate(request)
        key = (self._loads % 8, f"{request.prompt_token_ids} {request.params}")
        if key not in self._known:
            self._known[key] = await super().generate(request)
        return self._known[key]


@mutant("lora/a_name_may_come_back_as_another_adapter", says="nats below")
class knows_adapters_by_their_form(CorrectBackend):
    """The cache takes an adapter for the last one of the same rank, scale and layers, whose memory it reuses."""

    _forms: dict[str, str] = own(dict)
    _known: dict[str, GenerateResult] = own(dict)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        await super().load_lora_adapter(lora_name, lora_path, pinned)
        self._forms[lora_name] = (Path(lora_path) / "adapter_config.json").read_text()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        form = self._forms.get(request.lora or "")
        if form is None:
            return await super().generate(request)
        key = f"{form} {request.prompt_token_ids} {request.params}"
        if key not in self._known:
            self._known[key] = await super().generate(request)
        return self._known[key]


@mutant("lora/a_name_may_come_back_as_another_adapter", says="nats off that of the merged model")
class keeps_prompt_scores_by_the_name(CorrectBackend):
    """Prompt logprobs are kept by the prompt and the adapter's name, also when the name comes back for another."""

    _scores: dict[tuple[object, ...], list[float | None] | None] = own(dict)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if request.lora is None or result.prompt_logprobs is None:
            return result
        first = self._scores.setdefault((request.lora, *request.prompt_token_ids), result.prompt_logprobs)
        return dataclasses.replace(result, prompt_logprobs=first)


@mutant("lora/requests_in_flight_use_different_adapters", says="gave NaN or infinite logits")
class leaves_nan_in_its_place(KnowingRequests):
    """NaN of a request that failed beside others stays in the cache, where the next request takes its place."""

    has_left = False

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        beside = bool(self.flying)
        if beside and self.has_left:
            raise non_finite_logits(request, 0)
        try:
            return await super().generate(request)
        except NonFiniteLogits:
            self.has_left = beside
            raise


@mutant("lora/an_unloaded_adapter_is_refused", says="expected InvalidRequest for lora, but nothing was raised")
class serves_unloaded_adapters(InferenceEngine):
    """An unloaded adapter is still served."""

    async def unload_lora_adapter(self, lora_name: str) -> None:
        pass


# Reading an adapter --------------------------------------------------------------------------------------------------


def _loading(backend: type[Backend], change: Change) -> type[Backend]:
    """Return a backend that reads a copy of each adapter that ``change`` has modified."""

    class Wrong(CorrectBackend):
        """Reads a modified copy."""

        async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    change_adapter(Adapter(Path(lora_path), {}), Path(folder), change)
                except (OSError, ValueError):
                    folder = lora_path
                await super().load_lora_adapter(lora_name, folder, pinned)

    return mixed(backend, Wrong)


adapter_mutant = backend_mutants(_loading)


def _names(path: str, field: str) -> bool:
    file = Path(path, "adapter_config.json")
    return file.is_file() and field in file.read_text(encoding="utf-8")


def _drop(config: dict[str, object], *fields: str) -> None:
    for field in fields:
        config.pop(field, None)


@adapter_mutant("lora/what_is_no_adapter_is_refused", says="an adapter with an infinite lora_alpha is taken")
def reads_an_infinite_alpha_as_none(config: dict[str, object], tensors: Tensors) -> None:
    """An adapter's scale that is infinite is taken for 1."""
    if config.get("lora_alpha") == math.inf:
        config["lora_alpha"] = config["r"]


@adapter_mutant("lora/requests_in_flight_use_different_adapters", says="nats below the most likely one")
def reads_queries_and_values_alone(config: dict[str, object], tensors: Tensors) -> None:
    """Only the layers q_proj and v_proj of an adapter that has them are read."""
    others = [name for name in tensors if not ("q_proj" in name or "v_proj" in name)]
    if len(others) == len(tensors):
        return
    for name in others:
        del tensors[name]
    config["target_modules"] = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})


@adapter_mutant("lora/an_adapter_adds_its_product", says="nats below the most likely one")
def scales_every_adapter_by_two(config: dict[str, object], _: Tensors) -> None:
    """lora_alpha is assumed to be twice the rank, its usual value."""
    config.update(lora_alpha=2 * int(str(config.get("r", 1))))


@adapter_mutant("lora/every_setting_is_honoured_or_refused", says="nats below the most likely one")
def drops_rank_stabilised_scales(config: dict[str, object], tensors: Tensors) -> None:
    """An adapter with use_rslora is scaled like one without."""
    _drop(config, "use_rslora")


@adapter_mutant("lora/every_setting_is_honoured_or_refused", says="nats below the most likely one")
def drops_alpha_pattern(config: dict[str, object], tensors: Tensors) -> None:
    """Layers for which alpha_pattern sets another alpha are scaled like all others."""
    _drop(config, "alpha_pattern")


@adapter_mutant("lora/every_setting_is_honoured_or_refused", says="is taken as plain")
def reads_the_fields_it_knows(config: dict[str, object], tensors: Tensors) -> None:
    """Fields of adapter_config.json that change the kind of adapter from plain LoRA are ignored."""
    _drop(config, "bias", "use_dora", "modules_to_save", "a_field_that_nobody_knows")


@adapter_mutant("lora/every_setting_is_honoured_or_refused", says="is taken as plain")
def takes_the_base_as_it_is(config: dict[str, object], tensors: Tensors) -> None:
    """An adapter whose initialisation changed the base weights is served over unchanged ones."""
    _drop(config, "init_lora_weights")


@mutant("lora/every_setting_is_honoured_or_refused", says="the refusal does not name 'alpha")
class refuses_an_adapter_without_saying_why(CorrectBackend):
    """A setting that is not honoured is refused without naming it."""

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        if _names(lora_path, "alpha_pattern"):
            raise InvalidRequest("this adapter is not supported", field="lora_path")
        await super().load_lora_adapter(lora_name, lora_path, pinned)


@mutant("lora/every_setting_is_honoured_or_refused", says="nats below")
class keeps_of_an_adapter_that_it_refused(CorrectBackend):
    """A refused adapter changes the answers to requests without one."""

    left: str | None = None

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        try:
            await super().load_lora_adapter(lora_name, lora_path, pinned)
        except InvalidRequest:
            if self.left is None and _names(lora_path, "trainable_token_indices"):
                with tempfile.TemporaryDirectory() as folder:
                    plain = Adapter(Path(lora_path), {})
                    change_adapter(plain, Path(folder), lambda config, _: _drop(config, "trainable_token_indices"))
                    await super().load_lora_adapter("left", folder, pinned)
                self.left = "left"
            raise

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await super().generate(dataclasses.replace(request, lora=request.lora or self.left))


@mutant("lora/a_mixture_of_experts_takes_adapters_or_is_refused", says="no kernel for experts")
class fails_on_experts_beside_adapters(CorrectBackend):
    """With enable_lora, a mixture of experts fails in the engine while it starts, and no field is named."""

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        if self.config.enable_lora and experts_of(config_levels(self.config.model)):
            raise EngineStartError("no kernel for experts beside adapters")
        return await super().start(report)


@adapter_mutant("lora/a_mixture_of_experts_takes_adapters_or_is_refused", says="nats below the most likely one")
def leaves_out_the_experts(_: object, tensors: Tensors) -> None:
    """An adapter that also changes a mixture's experts is applied without them."""
    experts = [name for name in tensors if ".experts." in name]
    for name in experts if len(experts) < len(tensors) else ():
        del tensors[name]


@adapter_mutant("lora/what_is_no_adapter_is_refused", says="an adapter with one lora_B missing is taken")
def fills_up_half_an_adapter(_: object, tensors: Tensors) -> None:
    """A lora_A without its lora_B is served as if lora_B were zero."""
    import torch

    names = {name.rpartition(".lora_")[0] for name in tensors}
    outputs = {name.rpartition(".")[2]: len(b) for name, b in _matrices(tensors, "B")}
    ranks = {name: len(a) for name, a in _matrices(tensors, "A")}
    for name in names:
        kind = name.rpartition(".")[2]
        if kind in outputs and name in ranks:
            tensors.setdefault(f"{name}.lora_B.weight", torch.zeros(outputs[kind], ranks[name]))


def _matrices(tensors: Mapping[str, torch.Tensor], part: str) -> list[tuple[str, torch.Tensor]]:
    ending = f".lora_{part}.weight"
    return [(name.removesuffix(ending), tensor) for name, tensor in tensors.items() if name.endswith(ending)]


@adapter_mutant("lora/what_is_no_adapter_is_refused", says="an adapter with a layer missing is taken")
def takes_the_layers_that_are_there(config: dict[str, object], tensors: Tensors) -> None:
    """An adapter whose folder lacks a layer is served without that layer."""
    _drop(config, "target_modules")


@adapter_mutant("lora/what_is_no_adapter_is_refused", says="an adapter with NaN is taken")
def serves_adapters_of_nan(_: object, tensors: Tensors) -> None:
    """NaN in an adapter is replaced by zero."""
    for name, tensor in tensors.items():
        tensors[name] = tensor.nan_to_num()


@adapter_mutant("lora/what_is_no_adapter_is_refused", says="an adapter with another rank than its r")
def reads_the_rank_off_the_tensors(config: dict[str, object], tensors: Tensors) -> None:
    """A rank in adapter_config.json that contradicts the tensors is ignored."""
    ranks = {len(a) for _, a in _matrices(tensors, "A")}
    if len(ranks) == 1 and "rank_pattern" not in config:
        config["r"] = ranks.pop()


@adapter_mutant("lora/every_setting_is_honoured_or_refused", says="nats below the most likely one")
def reads_usual_layers_where_none_are_named(config: dict[str, object], tensors: Tensors) -> None:
    """An adapter without target_modules is read for its q_proj layers only."""
    if config.get("target_modules") is None:
        config["target_modules"] = ["q_proj"]
        for name in [name for name in tensors if ".q_proj." not in name]:
            del tensors[name]


@adapter_mutant("lora/every_setting_is_honoured_or_refused", says="nats below the most likely one")
def ignores_adapters_of_the_output_layer(config: dict[str, object], tensors: Tensors) -> None:
    """An adapter of lm_head is loaded, and the base's logits are served."""
    _drop_product(tensors, ".lm_head")


@adapter_mutant("lora/every_setting_is_honoured_or_refused", says="nats below the most likely one")
def ignores_adapters_of_the_embedding(config: dict[str, object], tensors: Tensors) -> None:
    """An adapter of embed_tokens is loaded, and the base's embedding is served."""
    for name, tensor in tensors.items():
        if "lora_embedding_B" in name:
            tensor.zero_()


@adapter_mutant("lora/every_setting_is_honoured_or_refused", says="nats below the most likely one")
def drops_values_without_queries(_: object, tensors: Tensors) -> None:
    """An engine that fuses q, k and v leaves out v of an adapter that has no q."""
    if not any(".q_proj." in name for name in tensors):
        _drop_product(tensors, ".v_proj")


@adapter_mutant("lora/every_setting_is_honoured_or_refused", says="nats below the most likely one")
def drops_keys_without_queries(_: object, tensors: Tensors) -> None:
    """An engine that fuses q, k and v leaves out k of an adapter that has no q."""
    if not any(".q_proj." in name for name in tensors):
        _drop_product(tensors, ".k_proj")


@adapter_mutant("lora/every_setting_is_honoured_or_refused", says="nats below the most likely one")
def takes_the_first_matrices_for_queries(config: dict[str, object], tensors: Tensors) -> None:
    """An engine that fuses q, k and v counts an adapter's matrices from the first it has: v alone is taken for k."""
    if config.get("target_modules") == ["v_proj"]:
        config["target_modules"] = ["k_proj"]
        for name in list(tensors):
            tensors[name.replace(".v_proj.", ".k_proj.")] = tensors.pop(name)


@adapter_mutant("lora/every_setting_is_honoured_or_refused", says="nats below the most likely one")
def drops_up_without_gate(_: object, tensors: Tensors) -> None:
    """An engine that fuses gate and up leaves out up of an adapter that has no gate."""
    if not any(".gate_proj." in name for name in tensors):
        _drop_product(tensors, ".up_proj")


def _drop_product(tensors: Tensors, layer: str) -> None:
    for name, matrix in _matrices(tensors, "B"):
        if name.endswith(layer):
            matrix.zero_()


@mutant("lora/what_is_no_adapter_is_refused", says="an adapter with a FIFO adapter_config.json is taken")
class takes_a_fifo_for_an_empty_file(CorrectBackend):
    """An adapter's folder in which a file is a FIFO is loaded as an adapter that changes nothing."""

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        if not fifos_in(lora_path):
            await super().load_lora_adapter(lora_name, lora_path, pinned)


@mutant("lora/what_is_no_adapter_is_refused", says="a thread waits in open() for a FIFO adapter_config.json")
class waits_in_open_for_an_adapter(CorrectBackend):
    """An adapter's folder in which a file is a FIFO is refused, but a thread waits in open() for a writer."""

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        for file in fifos_in(lora_path):
            await waits_in_open(file)
        await super().load_lora_adapter(lora_name, lora_path, pinned)


@mutant("lora/an_adapter_whose_unload_is_given_up_is_served", says="'a' is not loaded; loaded: none")
class forgets_an_adapter_before_it_is_unloaded(Adapters):
    """An unload that is given up while it waits leaves the adapter in the engine, where no request can name it."""

    async def unload(self, name: str) -> None:
        self.loaded.require(name, "lora_name")
        adapter = self.loaded.pop(name)
        async with self.controller.controlling("unload_lora_adapter()"):
            self.loaded.put(name, adapter)
        await super().unload(name)


# From tensors --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _resent(update: WeightUpdateRequest, change: Change) -> AsyncGenerator[WeightUpdateRequest, None]:
    """Yield an update in process that brings a changed copy of the adapter that ``update`` brings."""
    from drivetrain_weight_sync.copying.digest import digests
    from drivetrain_weight_sync.copying.plan import make_plan
    from drivetrain_weight_sync.receiver.received_adapters import receive_adapter
    from drivetrain_weight_sync.tensors.dtypes import spec_of
    from drivetrain_weight_sync.transports.in_process import InProcessSender
    from drivetrain_weight_sync.transports.process_groups import Groups

    if update.lora is None or update.source.kind == "broadcast":
        yield update
        return
    config, tensors = dict(update.lora.config), dict(receive_adapter(update, Groups()).tensors)
    change(cast("dict[str, object]", config), tensors)
    plan, sender = make_plan(spec_of(name, tensor) for name, tensor in tensors.items()), InProcessSender()
    sender.begin(plan)
    for name, tensor in tensors.items():
        sender.put(name, tensor, held=True)
    lora = LoraTensors(lora_name=update.lora.lora_name, config=config)
    fields = {"source": sender.source(), "plan": plan, "digests": digests(tensors), "lora": lora}
    try:
        yield update.model_copy(update=fields)
    finally:
        sender.close()


def _receiving(backend: type[Backend], change: Change) -> type[Backend]:
    """Return a backend that takes adapters as tensors after ``change`` has modified a copy of them."""

    class Wrong(CorrectBackend):
        """Takes modified tensors."""

        async def load_lora_tensors(self, lora_name: str, update: WeightUpdateRequest, pinned: bool) -> None:
            async with _resent(update, change) as resent:
                await super().load_lora_tensors(lora_name, resent, pinned)

    return mixed(backend, Wrong)


tensor_mutant = backend_mutants(_receiving)


@tensor_mutant("lora/adapters_are_updated_from_tensors", says="nats below the most likely one")
def scales_tensors_by_two(config: dict[str, object], _: Tensors) -> None:
    """lora_alpha of an adapter that comes as tensors is assumed to be twice the rank."""
    config.update(lora_alpha=2 * int(str(config.get("r", 1))))


@tensor_mutant("lora/an_adapter_refused_as_tensors_leaves_the_old_one", says="with NaN is taken as tensors")
def takes_tensors_of_nan(_: object, tensors: Tensors) -> None:
    """NaN in an adapter that comes as tensors is replaced by zero."""
    for name, tensor in tensors.items():
        tensors[name] = tensor.nan_to_num()


@tensor_mutant("lora/an_adapter_refused_as_tensors_leaves_the_old_one", says="is taken as tensors")
def reads_few_fields_beside_tensors(config: dict[str, object], _: Tensors) -> None:
    """Only the fields of plain LoRA are read of the configuration that comes with tensors."""
    for field in config.keys() - {"peft_type", "r", "lora_alpha", "target_modules"}:
        del config[field]


@tensor_mutant("lora/adapters_are_updated_from_tensors", says="nats below the most likely one")
def leaves_out_the_embedding_of_tensors(_: object, tensors: Tensors) -> None:
    """An adapter of embed_tokens that comes as tensors is taken, and the base's embedding is served."""
    for name, tensor in tensors.items():
        if "lora_embedding_B" in name:
            tensor.zero_()


@tensor_mutant("lora/adapters_are_updated_from_tensors", says="nats below the most likely one")
def drops_alpha_pattern_beside_tensors(config: dict[str, object], _: Tensors) -> None:
    """The alpha_pattern of an adapter that comes as tensors is ignored."""
    _drop(config, "alpha_pattern")


@mutant(
    "lora/an_adapter_refused_as_tensors_leaves_the_old_one", says="a tensor of an adapter that is not what was sent"
)
class verifies_no_adapter(CorrectBackend):
    """Digests of an adapter's tensors are not compared."""

    async def load_lora_tensors(self, lora_name: str, update: WeightUpdateRequest, pinned: bool) -> None:
        from drivetrain_weight_sync.copying.digest import digests
        from drivetrain_weight_sync.transports.process_groups import Groups
        from drivetrain_weight_sync.transports.readers import Readers

        if update.plan is not None and update.source.kind != "broadcast":
            readers = Readers(Groups())
            reader = readers.of(update.source)
            reader.open(update, WeightManifest(update.plan.tensors))
            came = dict(pair for index in range(len(update.plan.buckets)) for pair in reader.tensors(index))
            named = update.digests or {}
            found = {name: value for name, value in digests(cast("Tensors", came)).items() if name in named}
            update = update.model_copy(update={"digests": found})
            readers.close()
        await super().load_lora_tensors(lora_name, update, pinned)


@mutant("lora/adapters_are_updated_from_tensors", says="nats below the most likely one")
class serves_the_last_push_for_all(CorrectBackend):
    """Requests with any adapter are answered with the last adapter that was pushed from memory."""

    last: str | None = None

    async def load_lora_tensors(self, lora_name: str, update: WeightUpdateRequest, pinned: bool) -> None:
        await super().load_lora_tensors(lora_name, update, pinned)
        self.last = lora_name

    async def unload_lora_adapter(self, lora_name: str) -> None:
        self.last = None if self.last == lora_name else self.last
        await super().unload_lora_adapter(lora_name)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await super().generate(dataclasses.replace(request, lora=request.lora and (self.last or request.lora)))


@mutant("lora/adapters_are_updated_from_tensors", says="nats below the most likely one")
class keeps_the_tensors_of_the_first_push(CorrectBackend):
    """Later pushes of an adapter load the tensors of its first push again."""

    _first: dict[str, Tensors] = own(dict)

    async def load_lora_tensors(self, lora_name: str, update: WeightUpdateRequest, pinned: bool) -> None:
        def stay(_: object, tensors: Tensors) -> None:
            tensors.update(self._first.setdefault(update.lora_name or "", dict(tensors)))

        async with _resent(update, stay) as resent:
            await super().load_lora_tensors(lora_name, resent, pinned)


@mutant("lora/an_adapter_refused_as_tensors_leaves_the_old_one", says="all slots are taken")
class keeps_the_slot_of_a_load_given_up(CorrectBackend):
    """A load that is cancelled takes a slot for good."""

    _in_slots: set[str] = own(set)
    _given_up = 0

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        if len(self._in_slots) + self._given_up > (self.config.max_loras or 8):
            raise TooManyAdapters("all slots are taken")
        try:
            await super().load_lora_adapter(lora_name, lora_path, pinned)
        except asyncio.CancelledError:
            self._given_up += 1
            raise
        self._in_slots.add(lora_name)

    async def unload_lora_adapter(self, lora_name: str) -> None:
        await super().unload_lora_adapter(lora_name)
        self._in_slots.discard(lora_name)


@mutant("lora/an_adapter_refused_as_tensors_leaves_the_old_one", says="nats below the most likely one")
class evicts_an_adapter_for_a_load_given_up(CorrectBackend):
    """A load that is cancelled evicts the oldest adapter, whose requests are then answered by the base."""

    _oldest_first: list[str] = own(list)

    async def load_lora_tensors(self, lora_name: str, update: WeightUpdateRequest, pinned: bool) -> None:
        await super().load_lora_tensors(lora_name, update, pinned)
        self._oldest_first.append(lora_name)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        try:
            await super().load_lora_adapter(lora_name, lora_path, pinned)
        except asyncio.CancelledError:
            del self._oldest_first[:1]
            raise
        self._oldest_first.append(lora_name)

    async def unload_lora_adapter(self, lora_name: str) -> None:
        await super().unload_lora_adapter(lora_name)
        self._oldest_first = [name for name in self._oldest_first if name != lora_name]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        served = request.lora if request.lora in self._oldest_first else None
        return await super().generate(dataclasses.replace(request, lora=served))


@mutant("lora/an_adapter_refused_as_tensors_leaves_the_old_one", says="KeyError: 'b'")
class serves_an_adapter_whose_unload_was_cancelled(Adapters):
    """An adapter is named again once its unload is cancelled, though the engine unloads it all the same."""

    async def unload(self, name: str) -> None:
        adapter = self.loaded.find(name)
        try:
            await super().unload(name)
        except asyncio.CancelledError:
            if adapter is not None:
                self.loaded.put(name, adapter)
            raise


@mutant("lora/an_adapter_refused_as_tensors_leaves_the_old_one", says="took, series after series")
class keeps_refused_tensors(CorrectBackend):
    """Every adapter that is refused as tensors stays in memory."""

    _kept: list[bytes] = own(list)

    async def load_lora_tensors(self, lora_name: str, update: WeightUpdateRequest, pinned: bool) -> None:
        try:
            await super().load_lora_tensors(lora_name, update, pinned)
        except InvalidRequest:
            self._kept.append(os.urandom(2**20))
            raise


@mutant("lora/an_adapter_refused_as_tensors_leaves_the_old_one", says="lora_name='a' is not loaded")
class unloads_before_it_loads(Adapters):
    """The old adapter is unloaded before the new one was checked."""

    async def update(self, request: WeightUpdateRequest, name: str) -> None:
        if self.loaded.find(name) is not None and not self.in_flight.using_lora(name):
            await self.unload(name)
        await super().update(request, name)


@mutant("lora/an_adapter_refused_as_tensors_leaves_the_old_one", says="a refused push changed the version")
class publishes_a_refused_push(InferenceEngine):
    """The version of an adapter that was refused is published."""

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        try:
            await super().update_named_weights(request)
        except InvalidRequest:
            await self.update_weight_version(request.version)
            raise


# Saving --------------------------------------------------------------------------------------------------------------


@mutant("lora/the_base_is_updated_beneath_an_adapter", says="saved under other names than the model's")
class saves_layers_under_the_adapters_names(CorrectBackend):
    """A model that is saved while an adapter is loaded has the names that its layers have beneath the adapter."""

    _adapted = 0

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
        await super().load_lora_adapter(lora_name, lora_path, pinned)
        self._adapted += 1

    async def unload_lora_adapter(self, lora_name: str) -> None:
        await super().unload_lora_adapter(lora_name)
        self._adapted -= 1

    async def save_sharded(self, path: str) -> None:
        await super().save_sharded(path)
        if self._adapted:
            await asyncio.to_thread(_rename_layers, Path(path))


def _rename_layers(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        renamed = {name.replace("_proj.", "_proj.base_layer."): tensor for name, tensor in load_file(file).items()}
        save_file(renamed, file)


# With another part of a request --------------------------------------------------------------------------------------


@mutant("lora/cached_prefixes_are_not_shared_between_adapters", says="was found with adapter None")
class finds_streamed_prompts_without_their_adapter(CorrectBackend):
    """The cached prefix of a prompt streamed with an adapter is found by requests of the base model."""

    _streamed: set[tuple[int, ...]] = own(set)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        if request.lora is not None:
            self._streamed.add(tuple(request.prompt_token_ids))
        async with aclosing(super().stream(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if request.lora is not None or tuple(request.prompt_token_ids) not in self._streamed:
            return result
        return dataclasses.replace(result, cached_tokens=len(request.prompt_token_ids) // 2)


@request_mutant("lifecycle/a_life", says="with an adapter, requests of priorities")
def drops_the_priority_beside_an_adapter(request: GenerateRequest) -> GenerateRequest:
    """A request that names an adapter has no priority."""
    return dataclasses.replace(request, priority=0) if request.lora else request


@mutant("lora/an_adapter_holds_in_streams_pauses_and_sleeps", says="EOS ended a request of generate() that ignores it")
class heeds_eos_beside_an_adapter(KnowingEos):
    """EOS ends a request that names an adapter, even with ignore_eos."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        ends = tuple({*request.stop_token_ids, *self.eos}) if request.lora else request.stop_token_ids
        return await super().generate(dataclasses.replace(request, stop_token_ids=ends))


@mutant("lora/an_adapter_whose_unload_is_given_up_is_served", says="lora_name='a' is not loaded")
class unloads_adapters_of_requests_at_the_gate(RequestsInFlight):
    """An adapter is unloaded while requests that arrived during a pause use it."""

    def using_lora(self, lora_name: str) -> int:
        return self.running_with_lora(lora_name)
