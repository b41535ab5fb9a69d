# pyright: reportMissingImports=false
"""Reads the experts of each token from SGLang's record, which has a row for each slot of the KV cache.

A cached prefix keeps its slots, so its rows are those of the pass that filled them. SGLang itself loses the rows of a
retracted request, whose slots are given away, and has room for the record only beside a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from drivetrain.errors import EngineStartError
from drivetrain_sglang.in_engine.request_cache import of_request

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_KEPT: Final = "_drivetrain_experts"
"""Attribute of a retracted request: the rows of the passes that it had run."""
_UNKNOWN: Final = -1
"""Number in the record for an expert that no layer has written."""
_CAPTURER: Final = "sglang.srt.state_capturer"
_RETRACT: Final = "sglang.srt.managers.schedule_batch.release_req"
_RESULTS: Final = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"


def register() -> None:
    """Hook the record, the end of a request, and its retraction."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_CAPTURER}.base.BaseHostCache.__init__", _make_record, HookType.AROUND)
    HookRegistry.register(f"{_CAPTURER}.routed_experts.RoutedExpertsCapturer.__init__", _clear, HookType.AFTER)
    HookRegistry.register(_RETRACT, _keep, HookType.BEFORE)
    HookRegistry.register(f"{_RESULTS}._maybe_collect_routed_experts", _collect, HookType.REPLACE)


def layers_with_experts(model: torch.nn.Module) -> list[int]:
    """Return the numbers of the layers whose experts SGLang records, once a request was run.

    Raises:
        EngineStartError: SGLang does not record the experts of every layer that has them, or no layer has experts.
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    recorder, modules = _recorder(), list[Any](model.modules())
    # Columns beyond these are of shared experts, which every token has.
    row = [] if recorder is None else recorder.device_cache.buffer[0, :, : recorder.topk_size].amin(dim=-1).tolist()
    recorded = [layer for layer, least in enumerate(row) if least != _UNKNOWN]
    layers = {int(module.layer_id) for module in modules if isinstance(module, FusedMoE)}
    missing = sorted(layers.difference(recorded))
    if missing:
        raise EngineStartError(
            f"the kernels of layers {missing} route tokens themselves, and SGLang does not record their experts; set "
            "another moe_runner_backend in engine_kwargs, or leave enable_return_routed_experts out"
        )
    if not recorded:
        raise EngineStartError("SGLang records experts for no layer of this model")
    return recorded


def collect(req: Req, table: torch.Tensor | None) -> None:
    """Give a request its rows: rows kept at its retraction, then rows of its slots.

    Args:
        req: A request that ends.
        table: SGLang's table of slots; None if the request holds none.
    """
    if not req.return_routed_experts:
        return
    rows = _all_rows(req, table)
    sent: Any = rows if rows is None or not _is_pickled() else rows.numpy().tobytes()
    req.routed_experts = sent


def _is_pickled() -> bool:
    """Return whether SGLang's processes exchange pickles: a tensor takes longer to pickle than its bytes."""
    from sglang.srt.managers import io_struct

    return bool(getattr(io_struct, "_USE_PICKLE_IPC", True))


def _all_rows(req: Req, table: torch.Tensor | None) -> torch.Tensor | None:
    parts = [getattr(req, _KEPT, None), None if table is None else _rows(req, table, max(len(req.output_ids), 1))]
    first, last = parts
    if first is not None and last is not None:
        last = last[len(first) :]
    given = [part for part in (first, last) if part is not None]
    return torch.cat(given) if given else None


def _recorder() -> Any:
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    return get_global_experts_capturer()


def _rows(req: Req, table: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return the experts of the passes that so many output tokens were drawn from, and of the prompt before them."""
    end = len(req.origin_input_ids) + outputs - 1
    slots = table[of_request(req, "req_pool_idx"), req.routed_experts_start_len : end]
    rows: torch.Tensor = _recorder().host_cache.buffer[slots.cpu().long()]
    # They are copied a few times on their way to the trainer; SGLang's own 32 bits would take twice the time.
    return rows.to(torch.int16)


def _make_record(original: Callable[..., None], record: Any, *sizes: Any, **named: Any) -> None:
    """Make the record in plain memory if there is no GPU; SGLang would pin it."""
    if torch.accelerator.is_available():
        original(record, *sizes, **named)
        return
    names = ("num_tokens", "num_layers", "topk_size", "name")
    given = {**dict(zip(names, sizes, strict=False)), **named}
    for name in names:
        setattr(record, name, given[name])
    shape = record.num_tokens, record.num_layers, record.topk_size
    record.buffer = torch.zeros(shape, dtype=torch.int32)


def _clear(_: None, recorder: Any, *__: Any, **___: Any) -> None:
    """Mark all rows as not written: SGLang's zeros would pass for an expert."""
    recorder.host_cache.buffer.fill_(_UNKNOWN)
    recorder.device_cache.buffer.fill_(_UNKNOWN)


def _keep(*, req: Req, req_to_token_pool: Any, **_: Any) -> None:
    """Keep the rows of a request that is retracted: it will be given other slots."""
    if req.return_routed_experts and req.output_ids and _recorder() is not None:
        setattr(req, _KEPT, _all_rows(req, req_to_token_pool.req_to_token))


def _collect(results: Any, req: Req) -> None:
    if _recorder() is not None:
        collect(req, results.req_to_token_pool.req_to_token)
