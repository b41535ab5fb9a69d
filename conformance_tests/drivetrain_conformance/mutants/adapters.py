"""LoRA adapters that are mixed up, ignored, read in part, or not unloaded."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult
from drivetrain.backend.toolkit.translation import non_finite_logits
from drivetrain.engine.adapters import Adapters
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.parts import PartKinds
from drivetrain.errors import InvalidRequest, NonFiniteLogits
from drivetrain_conformance.assets.made_adapters import Adapter, change_adapter
from drivetrain_conformance.mutants.registry import spoiled_backend, spoiled_engine, spoiled_part
from drivetrain_conformance.mutants.spoil import SoundBackend, asking, mixed

if TYPE_CHECKING:
    import torch

    Change = Callable[[dict[str, object], dict[str, torch.Tensor]], object]

# Choice of the adapter -----------------------------------------------------------------------------------------------


@spoiled_backend(caught_by="lora/an_adapter_adds_its_product", says="nats below the most likely one")
def ignores_adapters(backend: type[Backend]) -> type[Backend]:
    """Requests that name an adapter are answered by the model without it."""
    return asking(backend, lambda request: dataclasses.replace(request, lora=None))


@spoiled_backend(caught_by="lora/requests_in_flight_use_different_adapters", says="nats below the most likely one")
def uses_an_adapter_for_all(backend: type[Backend]) -> type[Backend]:
    """Once an adapter was used, requests that name none are answered with it too."""

    class Wrong(SoundBackend):
        """Switches the model to an adapter, and never back."""

        active: str | None = None

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            self.active = request.lora or self.active
            return await super().generate(dataclasses.replace(request, lora=self.active))

        async def unload_lora_adapter(self, lora_name: str) -> None:
            self.active = None
            await super().unload_lora_adapter(lora_name)

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="lora/requests_in_flight_use_different_adapters", says="gave NaN or infinite logits")
def fails_the_whole_batch(backend: type[Backend]) -> type[Backend]:
    """NaN logits of one request end all requests of the same step with its error."""

    class Wrong(SoundBackend):
        """Raises the error in the step that draws tokens for all."""

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

    return mixed(backend, Wrong)


@spoiled_engine(
    caught_by="lora/an_unloaded_adapter_is_refused", says="expected InvalidRequest for lora, but nothing was raised"
)
def serves_unloaded_adapters(engine: type[InferenceEngine]) -> type[InferenceEngine]:
    """An unloaded adapter is still served."""

    class Wrong(InferenceEngine):
        """Leaves the adapter to be evicted some time."""

        async def unload_lora_adapter(self, lora_name: str) -> None:
            pass

    return mixed(engine, Wrong)


# Reading an adapter --------------------------------------------------------------------------------------------------


def _loading(backend: type[Backend], change: Change) -> type[Backend]:
    """Return a backend that reads a copy of each adapter that ``change`` has modified."""

    class Wrong(SoundBackend):
        """Reads a modified copy."""

        async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    change_adapter(Adapter(Path(lora_path), {}), Path(folder), change)
                except (OSError, ValueError):
                    folder = lora_path
                await super().load_lora_adapter(lora_name, folder, pinned)

    return mixed(backend, Wrong)


def _names(path: str, field: str) -> bool:
    file = Path(path, "adapter_config.json")
    return file.is_file() and field in file.read_text(encoding="utf-8")


def _dropping(*fields: str) -> Change:
    def change(config: dict[str, object], _: object) -> None:
        for field in fields:
            config.pop(field, None)

    return change


def _attention_alone(config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if not ("q_proj" in name or "v_proj" in name)]:
        del tensors[name]
    if tensors:
        config["target_modules"] = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})


@spoiled_backend(caught_by="lora/requests_in_flight_use_different_adapters", says="nats below the most likely one")
def reads_queries_and_values_alone(backend: type[Backend]) -> type[Backend]:
    """Only an adapter's layers q_proj and v_proj are read."""
    return _loading(backend, _attention_alone)


@spoiled_backend(caught_by="lora/an_adapter_adds_its_product", says="nats below the most likely one")
def scales_every_adapter_by_two(backend: type[Backend]) -> type[Backend]:
    """lora_alpha is assumed to be twice the rank, its usual value."""
    return _loading(backend, lambda config, _: config.update(lora_alpha=2 * int(str(config.get("r", 1)))))


@spoiled_backend(caught_by="lora/every_setting_is_honoured_or_refused", says="nats below the most likely one")
def drops_rank_stabilised_scales(backend: type[Backend]) -> type[Backend]:
    """An adapter with use_rslora is scaled like one without."""
    return _loading(backend, _dropping("use_rslora"))


@spoiled_backend(caught_by="lora/every_setting_is_honoured_or_refused", says="nats below the most likely one")
def drops_alpha_pattern(backend: type[Backend]) -> type[Backend]:
    """Layers for which alpha_pattern sets another alpha are scaled like all others."""
    return _loading(backend, _dropping("alpha_pattern"))


@spoiled_backend(caught_by="lora/every_setting_is_honoured_or_refused", says="is taken as plain")
def reads_the_fields_it_knows(backend: type[Backend]) -> type[Backend]:
    """Fields of adapter_config.json that change the kind of adapter from plain LoRA are ignored."""
    return _loading(backend, _dropping("bias", "use_dora", "modules_to_save", "a_field_that_nobody_knows"))


@spoiled_backend(caught_by="lora/every_setting_is_honoured_or_refused", says="is taken as plain")
def takes_the_base_as_it_is(backend: type[Backend]) -> type[Backend]:
    """An adapter whose initialisation changed the base weights is served over unchanged ones."""
    return _loading(backend, _dropping("init_lora_weights"))


@spoiled_backend(caught_by="lora/every_setting_is_honoured_or_refused", says="the refusal does not name 'alpha")
def refuses_an_adapter_without_saying_why(backend: type[Backend]) -> type[Backend]:
    """A setting that is not honoured is refused without naming it."""

    class Wrong(SoundBackend):
        async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
            if _names(lora_path, "alpha_pattern"):
                raise InvalidRequest("this adapter is not supported", field="lora_path")
            await super().load_lora_adapter(lora_name, lora_path, pinned)

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="lora/every_setting_is_honoured_or_refused", says="nats below")
def keeps_of_an_adapter_that_it_refused(backend: type[Backend]) -> type[Backend]:
    """A refused adapter changes the answers to requests without one."""

    class Wrong(SoundBackend):
        """Applies an adapter before checking it."""

        left: str | None = None

        async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool) -> None:
            try:
                await super().load_lora_adapter(lora_name, lora_path, pinned)
            except InvalidRequest:
                if self.left is None and _names(lora_path, "trainable_token_indices"):
                    with tempfile.TemporaryDirectory() as folder:
                        plain = _dropping("trainable_token_indices")
                        change_adapter(Adapter(Path(lora_path), {}), Path(folder), plain)
                        await super().load_lora_adapter("left", folder, pinned)
                    self.left = "left"
                raise

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            return await super().generate(dataclasses.replace(request, lora=request.lora or self.left))

    return mixed(backend, Wrong)


@spoiled_backend(caught_by="lora/what_is_no_adapter_is_refused", says="an adapter with one lora_B missing is taken")
def fills_up_half_an_adapter(backend: type[Backend]) -> type[Backend]:
    """A lora_A without its lora_B is served as if lora_B were zero."""

    def change(_: object, tensors: dict[str, torch.Tensor]) -> None:
        import torch

        names = {name.rpartition(".lora_")[0] for name in tensors}
        outputs = {name.rpartition(".")[2]: len(b) for name, b in _matrices(tensors, "B")}
        ranks = {name: len(a) for name, a in _matrices(tensors, "A")}
        for name in names:
            kind = name.rpartition(".")[2]
            if kind in outputs and name in ranks:
                tensors.setdefault(f"{name}.lora_B.weight", torch.zeros(outputs[kind], ranks[name]))

    return _loading(backend, change)


def _matrices(tensors: Mapping[str, torch.Tensor], part: str) -> list[tuple[str, torch.Tensor]]:
    ending = f".lora_{part}.weight"
    return [(name.removesuffix(ending), tensor) for name, tensor in tensors.items() if name.endswith(ending)]


@spoiled_backend(caught_by="lora/what_is_no_adapter_is_refused", says="an adapter with a layer missing is taken")
def takes_the_layers_that_are_there(backend: type[Backend]) -> type[Backend]:
    """An adapter whose folder lacks a layer is served without that layer."""
    return _loading(backend, _dropping("target_modules"))


@spoiled_backend(caught_by="lora/what_is_no_adapter_is_refused", says="an adapter with NaN is taken")
def serves_adapters_of_nan(backend: type[Backend]) -> type[Backend]:
    """NaN in an adapter is replaced by zero."""

    def change(_: object, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.nan_to_num()

    return _loading(backend, change)


@spoiled_backend(caught_by="lora/what_is_no_adapter_is_refused", says="an adapter with another rank than its r")
def reads_the_rank_off_the_tensors(backend: type[Backend]) -> type[Backend]:
    """A rank in adapter_config.json that contradicts the tensors is ignored."""

    def change(config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
        ranks = {len(a) for _, a in _matrices(tensors, "A")}
        if len(ranks) == 1 and "rank_pattern" not in config:
            config["r"] = ranks.pop()

    return _loading(backend, change)


@spoiled_backend(caught_by="lora/every_setting_is_honoured_or_refused", says="nats below the most likely one")
def reads_usual_layers_where_none_are_named(backend: type[Backend]) -> type[Backend]:
    """An adapter without target_modules is read for its q_proj layers only."""

    def change(config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
        if config.get("target_modules") is None:
            config["target_modules"] = ["q_proj"]
            for name in [name for name in tensors if ".q_proj." not in name]:
                del tensors[name]

    return _loading(backend, change)


@spoiled_backend(caught_by="lora/every_setting_is_honoured_or_refused", says="nats below the most likely one")
def ignores_adapters_of_the_output_layer(backend: type[Backend]) -> type[Backend]:
    """An adapter of lm_head is loaded, and the base's logits are served."""

    def change(config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
        for name, matrix in _matrices(tensors, "B"):
            if name.endswith(".lm_head"):
                matrix.zero_()

    return _loading(backend, change)


@spoiled_part(caught_by="lora/an_adapter_whose_unload_is_given_up_is_served", says="'a' is not loaded; loaded: none")
def forgets_an_adapter_before_it_is_unloaded(parts: PartKinds) -> PartKinds:
    """An unload that is given up while it waits leaves the adapter in the engine, where no request can name it."""

    class Wrong(Adapters):
        """Removes the name before it waits for its turn."""

        async def unload(self, name: str) -> None:
            self.loaded.require(name, "lora_name")
            adapter = self.loaded.pop(name)
            async with self.controller.controlling("unload_lora_adapter()"):
                self.loaded.put(name, adapter)
            await super().unload(name)

    return dataclasses.replace(parts, adapters=mixed(parts.adapters, Wrong))
