# pyright: reportMissingImports=false
"""Ends the use of adapters by requests that end without an answer: SGLang 0.5.17 counts them forever.

SGLang unloads an adapter once no request uses it. Release 0.5.17 ends a use where it hands out a request's last output.
It forgets the uses of requests that are aborted while they are queued, and of those whose caller stops waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

from drivetrain.backend.toolkit.engine_versions import source_mentions

_MANAGER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_UNHEARD: Final[WeakKeyDictionary[Any, dict[str, str]]] = WeakKeyDictionary()
"""By manager, the adapters' ids of requests that nothing waits for, which the scheduler has yet to end, by request."""
_releasing: Final[set[asyncio.Task[None]]] = set()
"""The event loop keeps only weak references to tasks."""
_RELEASED: Final = (500, 503)
"""Status codes of aborted requests whose use SGLang ends itself."""


def register() -> None:
    """Hook the ends of requests, in releases that miss some."""
    if source_mentions("sglang", "srt/managers/tokenizer_manager.py", "_release_lora_once"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MANAGER}._handle_abort_req", aborted_in_queue, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}._discard_pending_req_states", given_up, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}._handle_batch_output", ended_unheard, HookType.AROUND)


def aborted_in_queue(original: Callable[..., None], manager: Any, message: Any) -> None:
    """End the use of a request that was aborted before it ran."""
    state = manager.rid_to_state.get(message.rid)
    original(manager, message)
    _end_unheard(manager, message.rid)
    if (
        state is not None
        and message.rid not in manager.rid_to_state
        and (message.finished_reason or {}).get("status_code") not in _RELEASED
    ):
        _release(manager, _adapter_of(state))


def given_up(original: Callable[..., None], manager: Any, obj: Any, *rest: object) -> None:
    """End the use of a request whose caller stopped waiting: once the scheduler has ended it, if it got that far."""
    held = {rid: state for rid in manager._logical_rids(obj) if (state := manager.rid_to_state.get(rid)) is not None}
    original(manager, obj, *rest)
    for rid, state in held.items():
        adapter = _adapter_of(state)
        if adapter is None or rid in manager.rid_to_state:
            continue
        if state.dispatched:
            _UNHEARD.setdefault(manager, {})[rid] = adapter
        else:
            _release(manager, adapter)


async def ended_unheard(original: Callable[..., Awaitable[None]], manager: Any, output: Any) -> None:
    """End the uses of requests that the scheduler has ended, and that nothing waits for."""
    await original(manager, output)
    for rid, reason in zip(output.rids, output.finished_reasons, strict=True):
        if reason is not None:
            _end_unheard(manager, rid)


def _end_unheard(manager: Any, rid: str) -> None:
    _release(manager, _UNHEARD.get(manager, {}).pop(rid, None))


def _adapter_of(state: Any) -> str | None:
    """Return the id by which SGLang counts the uses of a request's adapter, or None."""
    return state.obj.lora_id if state.obj.lora_path else None


def _release(manager: Any, adapter: str | None) -> None:
    if adapter is not None:
        task = asyncio.get_running_loop().create_task(manager.lora_registry.release(adapter))
        _releasing.add(task)
        task.add_done_callback(_releasing.discard)
