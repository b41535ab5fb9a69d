"""Weights and adapters, as SkyRL calls them."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final, NotRequired, TypedDict

import torch

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.states import WeightState
from drivetrain.errors import InvalidRequest, UnsupportedCapability
from drivetrain.types.modes import PauseMode
from drivetrain.types.weights import DiskSource
from drivetrain.types.weights import WeightUpdateRequest as EngineUpdate
from drivetrain_trainers.skyrl.page import Page
from drivetrain_trainers.skyrl.transfer import BroadcastInfo, LoraLoadRequest, WeightTransferHandle, WeightUpdateRequest

_FORMATS: Final = (None, "auto", "safetensors")
_PROTOCOLS: Final = {"gcs": ("gs", "gcs"), "azure": ("az", "abfs", "abfss")}
"""SkyRL's storage types → fsspec's protocols; others have one name in both."""


class WeightIssue(TypedDict):
    """A tensor that holds NaN or infinity, or nothing but zeros."""

    name: str
    type: str
    """``nan``, ``inf`` or ``all_zeros``."""
    count: NotRequired[int]
    percentage: NotRequired[float]
    shape: NotRequired[list[int]]


class WeightValidation(TypedDict):
    """Result of ``validate_weights``."""

    valid: bool
    checked: int
    issues: list[WeightIssue]


class WeightIntegrity(TypedDict):
    """Result of ``check_weight_sync_integrity``."""

    weights_valid: bool
    version_match: bool | None
    """None if no version was expected."""
    current_version: str
    validation_details: WeightValidation


class WeightCalls(Page):
    """SkyRL's calls that update, check and save weights."""

    # Updates -----------------------------------------------------------------------------------------------------

    async def init_weight_update_communicator(self, init_info: BroadcastInfo | object) -> None:
        """Join the group of SkyRL's ``BroadcastInitInfo``; a ``CudaIpcInitInfo`` needs none.

        A group of the same name is left first, unless the info says ``override_existing_receiver=False``.

        Raises:
            UnsupportedCapability: The engine has several ranks, or there is no GPU for CUDA IPC or NCCL.
            DeadlineExceeded, WeightSyncError: The group did not form.
        """
        await self.transfers.join(init_info)

    async def update_named_weights(self, request: WeightUpdateRequest | LoraLoadRequest) -> None:
        """Receive the tensors of one of SkyRL's requests, or load the adapter of a ``LoraLoadRequest``.

        The engine serves on, and takes all tensors at once when the last one of the model has come: verified, and as
        ``weight_version`` of the requests. An adapter is named as its folder, and replaces one of that name.

        Raises:
            InvalidRequest: No group was formed, or the request is none of SkyRL's.
            WeightPlanMismatch: The engine has no such tensor, or one of another shape or dtype.
            DeadlineExceeded, WeightSyncError: The tensors did not come. The engine is as before.
        """
        await self.transfers.update(request)

    def supports_overlapped_weight_sync(self) -> bool:
        """Return True: tensors always come while the engine serves on."""
        return True

    async def start_weight_transfer(self, request: WeightUpdateRequest) -> WeightTransferHandle:
        """Receive tensors in the background; :meth:`finish_weight_transfer` applies them."""
        return self.transfers.start(request)

    async def finish_weight_transfer(self, handle: WeightTransferHandle, flush_cache: bool = True) -> None:
        """Wait for the tensors, and update the engine if they are the last ones of the model.

        Raises:
            UnsupportedCapability: ``flush_cache`` is False. Cache entries of older weights are never used.
            DrivetrainError: as :meth:`update_named_weights`.
        """
        _require_flush(flush_cache)
        await self.transfers.finish(handle)

    async def overlapped_weight_sync(
        self, request: WeightUpdateRequest, pause_mode: PauseMode | str = PauseMode.IN_PLACE
    ) -> None:
        """Receive tensors while the engine serves; with the last tensors, pause, update and resume."""
        handle = await self.start_weight_transfer(request)
        await handle.wait()
        if not self.transfers.complete:
            return
        await self.engine.pause_generation(pause_mode)
        try:
            await self.finish_weight_transfer(handle)
        finally:
            if self.engine.status.weights is WeightState.CLEAN:
                await self.engine.continue_generation()

    async def load_weights_from_disk(
        self, model_path: str | os.PathLike[str], load_format: str | None = None, flush_cache: bool = True
    ) -> None:
        """Update the weights from a checkpoint folder that the engine can read. The version counts up.

        Args:
            model_path: The folder.
            load_format: None, ``auto`` or ``safetensors``: the format is detected.
            flush_cache: If false, cached prefixes of the older weights stay in use.
        """
        if load_format not in _FORMATS:
            raise UnsupportedCapability(f"load_format={shown(load_format)}: expected None, 'auto' or 'safetensors'")
        version, source = self.transfers.next_version(), DiskSource(path=os.fspath(model_path))
        await self.engine.update_named_weights(
            EngineUpdate(version=version, source=source, keep_prefix_cache=not flush_cache)
        )

    # Adapters ----------------------------------------------------------------------------------------------------

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> None:
        """Load an adapter from a peft folder; ``sampling_params`` name it by ``lora_name``."""
        await self.engine.load_lora_adapter(lora_name, lora_path, pinned=pinned)

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter."""
        await self.engine.unload_lora_adapter(lora_name)

    # Version -----------------------------------------------------------------------------------------------------

    async def get_weight_version(self) -> str:
        """Return the version of the weights that are served."""
        return self.engine.get_weight_version()

    async def update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> None:
        """Give the weights another version; by default, requests end first, with the tokens so far."""
        if abort_all_requests:
            await self.engine.abort_generation()
        await self.engine.update_weight_version(new_version)

    @staticmethod
    async def get_remote_weight_version(endpoint: str, timeout: float = 10.0) -> str:
        """Ask the server at ``endpoint`` which weight version it serves."""
        return await InferenceEngine.get_remote_weight_version(endpoint, timeout=timeout)

    # Reading and checking ----------------------------------------------------------------------------------------

    async def get_weights_by_name(self, name: str) -> torch.Tensor | None:
        """Return a tensor by its checkpoint name; None if the model has none of that name."""
        manifest = await self.engine.weight_manifest()
        if name not in manifest.aliases and all(spec.name != name for spec in manifest.tensors):
            return None
        read = await self.engine.get_weights_by_name(name)
        dtype: torch.dtype = getattr(torch, read.spec.dtype)
        return torch.frombuffer(bytearray(read.data), dtype=dtype).view(read.spec.shape)

    async def validate_weights(
        self,
        names: Collection[str] | None = None,
        check_nan: bool = True,
        check_inf: bool = True,
        check_zeros: bool = False,
    ) -> WeightValidation:
        """Check tensors for NaN, infinity and, if asked, zeros only.

        Args:
            names: Tensors to check; None: all.
            check_nan: Look for NaN.
            check_inf: Look for infinity.
            check_zeros: Look for tensors of zeros only.

        Raises:
            InvalidRequest: The model has no tensor of that name.
        """
        report = await self.engine.validate_weights()
        chosen = None if names is None else await self._main_names(names)
        found = (
            ("nan", report.nan, check_nan),
            ("inf", report.infinite, check_inf),
            ("all_zeros", report.all_zero, check_zeros),
        )
        issues = [
            await self._issue(kind, name)
            for kind, bad, wanted in found
            for name in bad
            if wanted and (chosen is None or name in chosen)
        ]
        checked = report.checked if chosen is None else len(chosen)
        return WeightValidation(valid=not issues, checked=checked, issues=issues)

    async def _main_names(self, names: Collection[str]) -> set[str]:
        """Return the names under which tied tensors are checked."""
        manifest = await self.engine.weight_manifest()
        known = {spec.name for spec in manifest.tensors}
        found = {manifest.aliases.get(name, name) for name in names}
        for name in found - known:
            raise InvalidRequest(f"names: the model has no tensor {shown(name)}", field="names")
        return found

    async def _issue(self, kind: str, name: str) -> WeightIssue:
        tensor = await self.get_weights_by_name(name)
        assert tensor is not None
        if kind == "all_zeros":
            return WeightIssue(name=name, type=kind, shape=list(tensor.shape))
        count = int((tensor.isnan() if kind == "nan" else tensor.isinf()).sum())
        return WeightIssue(name=name, type=kind, count=count, percentage=100 * count / tensor.numel())

    async def check_weight_sync_integrity(self, expected_version: str | None = None) -> WeightIntegrity:
        """Check every tensor, and compare the served version with the expected one."""
        validation = await self.validate_weights()
        version = self.engine.get_weight_version()
        return WeightIntegrity(
            weights_valid=validation["valid"],
            version_match=None if expected_version is None else version == expected_version,
            current_version=version,
            validation_details=validation,
        )

    # Saving ------------------------------------------------------------------------------------------------------

    async def save_sharded_model(
        self, save_path: str | os.PathLike[str], pattern: str | None = None, max_size: int | None = None
    ) -> bool:
        """Save the weights that are served to a new folder; return True.

        Raises:
            UnsupportedCapability: ``pattern`` or ``max_size``: the engine names and sizes the files.
        """
        for name, value in (("pattern", pattern), ("max_size", max_size)):
            if value is not None:
                raise UnsupportedCapability(
                    f"{name}={shown(value)}: files are named and sized by the engine; leave it out"
                )
        await self.engine.save_sharded_model(save_path)
        return True

    async def save_remote_model(self, remote_path: str, storage_type: str = "s3") -> bool:
        """Save the weights that are served to an fsspec URL; return True.

        Args:
            remote_path: A URL, or a path to which the protocol of ``storage_type`` is added.
            storage_type: ``s3``, ``gcs``, ``azure`` or another protocol of fsspec.

        Raises:
            InvalidRequest: The URL is of another storage.
        """
        protocols = _PROTOCOLS.get(storage_type, (storage_type,))
        protocol, separator, _ = remote_path.partition("://")
        if separator and protocol not in protocols:
            raise InvalidRequest(
                f"storage_type={shown(storage_type)} is not that of {shown(remote_path)}; expected it to begin with "
                f"{protocols[0]}://",
                field="storage_type",
            )
        await self.engine.save_remote_model(remote_path if separator else f"{protocols[0]}://{remote_path}")
        return True


def _require_flush(flush_cache: bool) -> None:
    if not flush_cache:
        raise UnsupportedCapability(
            "flush_cache=False: cached prefixes of older weights are not used after a transfer; "
            "load_weights_from_disk() can keep them"
        )
