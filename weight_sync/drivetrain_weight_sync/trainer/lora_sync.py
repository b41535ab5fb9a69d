"""Weight sync for LoRA training: only the adapter is sent, megabytes instead of the base weights."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import torch
from safetensors.torch import save_file

from drivetrain.checks.extras import from_extra
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest, WeightSyncError
from drivetrain.types.arguments import checked
from drivetrain.types.modes import PauseMode
from drivetrain.types.weights import LoraSource, WeightUpdateRequest
from drivetrain_weight_sync.tensors.finite import non_finite
from drivetrain_weight_sync.trainer.staging import require_finite
from drivetrain_weight_sync.transports.push_folder import PushFolder

if TYPE_CHECKING:
    from peft import PeftModel


@runtime_checkable
class LoraEngine(Protocol):
    """The part of :class:`~drivetrain.engine.engine.InferenceEngine` that ``LoraSync`` uses."""

    async def update_named_weights(self, request: WeightUpdateRequest) -> None: ...


@dataclass(frozen=True, slots=True)
class LoraSyncResult:
    """Sizes and timings of a push; times are in seconds."""

    version: str
    lora_name: str
    tensors: int
    nbytes: int
    """Bytes of the adapter's tensors."""
    stage_seconds: float
    """Time to check and write the adapter, while the engine keeps serving."""
    update_seconds: float
    """Time until the engine has loaded the new adapter and unloaded the old one."""
    total_seconds: float


class LoraSync:
    """Pushes the adapter of a peft model to an engine with ``enable_lora``. Requests select it by ``lora_name``.

    The first push loads the adapter, each later push updates it. It travels through a folder. The folder of the last
    push is kept until the next push or :meth:`close`, for engines that read an adapter again.

    Args:
        model: a ``peft.PeftModel`` with a LoRA adapter.
        engine: the engine to push to.
        lora_name: the name by which requests select the adapter.
        adapter: the model's adapter to push.
        mode: pause mode for requests in flight that use the adapter: ``wait`` or ``abort``. They cannot continue with
            another adapter: with ``retract`` or ``in_place``, a push is refused while there are any.
        directory: parent of the folders, readable by the engine's process; None: the temporary folder.

    Raises:
        InvalidRequest: an argument has the wrong type or value, or the model has no adapter of that name.
    """

    @checked
    def __init__(
        self,
        model: PeftModel,
        engine: LoraEngine,
        lora_name: str = "policy",
        *,
        adapter: str = "default",
        mode: PauseMode = PauseMode.WAIT,
        directory: Path | None = None,
    ) -> None:
        adapters = getattr(model, "peft_config", None)
        if not isinstance(adapters, dict) or adapter not in adapters:
            found = ", ".join(adapters) if isinstance(adapters, dict) else "none, and it is no peft model"
            raise InvalidRequest(f"the model has no adapter {adapter!r}; it has: {found}", field="adapter")
        if not isinstance(engine, LoraEngine):
            raise InvalidRequest(f"engine={shown(engine)}: expected an InferenceEngine", field="engine")
        self._model = model
        self._engine = engine
        self._lora_name = lora_name
        self._adapter = adapter
        self._mode = mode
        self._directory = None if directory is None else Path(directory)
        self._pushed: PushFolder | None = None
        self._lock = asyncio.Lock()
        self._closed = False

    @checked
    async def push(self, *, version: str) -> LoraSyncResult:
        """Make the engine serve the adapter's current weights as ``version``. Pushes run one after another.

        If the push fails, the old adapter keeps serving. Base weights and other adapters do not change.

        Raises:
            InvalidRequest: the version is empty, or the engine does not accept such an adapter.
            InvalidWeights: the adapter holds NaN or infinity; nothing was sent.
            EngineBusy: requests in flight use the adapter, and ``mode`` is ``retract`` or ``in_place``.
            WeightSyncError: the sync is closed, or the adapter cannot be written to its folder.
        """
        async with self._lock:
            if self._closed:
                raise WeightSyncError("this LoraSync is closed; make a new one")
            begun = time.perf_counter()
            folder = await asyncio.to_thread(PushFolder, self._directory)
            try:
                tensors, nbytes = await asyncio.to_thread(self._write, folder)
                staged = time.perf_counter()
                source = LoraSource(lora_name=self._lora_name, path=str(folder.path))
                await self._engine.update_named_weights(
                    WeightUpdateRequest(version=version, source=source, mode=self._mode)
                )
            except BaseException:
                folder.remove()
                raise
            self._pushed, old = folder, self._pushed
            if old is not None:
                old.remove()
        ended = time.perf_counter()
        return LoraSyncResult(version, self._lora_name, tensors, nbytes, staged - begun, ended - staged, ended - begun)

    async def close(self) -> None:
        """Wait for a push under way, then remove the folder; the engine keeps the adapter. Idempotent."""
        async with self._lock:
            self._closed = True
            pushed, self._pushed = self._pushed, None
            if pushed is not None:
                pushed.remove()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @torch.no_grad()
    def _write(self, folder: PushFolder) -> tuple[int, int]:
        """Write the adapter as a peft folder; return the number of tensors and their bytes."""
        with from_extra("lora", "LoraSync"):
            from peft import get_peft_model_state_dict

        # By default peft also writes the base embedding if the adapter targets it.
        state = get_peft_model_state_dict(self._model, adapter_name=self._adapter, save_embedding_layers=False)
        require_finite(non_finite(state), "tensors of the adapter")
        tensors = {name: tensor.to("cpu").contiguous() for name, tensor in state.items()}
        config = self._model.peft_config[self._adapter]
        with folder.writing():
            save_file(tensors, folder.path / "adapter_model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(str(folder.path))
            _drop_defaults(folder.path / "adapter_config.json", type(config)().to_dict())
        return len(tensors), sum(tensor.nbytes for tensor in tensors.values())


def _drop_defaults(file: Path, defaults: Mapping[str, object]) -> None:
    """Remove fields at their default: the engine's environment may have an older peft, or none."""
    config = json.loads(file.read_text(encoding="utf-8"))
    kept = {
        field: value
        for field, value in config.items()
        if field in ("peft_type", "r", "lora_alpha") or field not in defaults or value != defaults[field]
    }
    file.write_text(json.dumps(kept), encoding="utf-8")
