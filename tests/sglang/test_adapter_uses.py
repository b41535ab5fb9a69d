"""SGLang 0.5.17 counts the uses of adapters; a request that ends without an answer ends its use too."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain_sglang.in_engine import adapter_uses


class Registry:
    """Counts uses."""

    def __init__(self) -> None:
        self.uses: Counter[str] = Counter()

    async def release(self, adapter: str) -> None:
        self.uses[adapter] -= 1


class Manager:
    """Ends requests as the tokenizer manager of SGLang 0.5.17 does."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.lora_registry = Registry()

    def begin(self, rid: str, *, adapter: str | None = "a", dispatched: bool = True) -> Any:
        obj = SimpleNamespace(rid=rid, lora_path=adapter and "name", lora_id=adapter)
        self.rid_to_state[rid] = SimpleNamespace(obj=obj, dispatched=dispatched)
        if adapter:
            self.lora_registry.uses[adapter] += 1
        return obj

    def _logical_rids(self, obj: Any) -> list[str]:
        return [obj.rid]

    def aborted(self, message: Any) -> None:
        self.rid_to_state.pop(message.rid, None)

    def given_up(self, obj: Any, lifecycles: object) -> None:
        self.rid_to_state.pop(obj.rid, None)

    async def output(self, output: Any) -> None:
        for rid, reason in zip(output.rids, output.finished_reasons, strict=True):
            state = self.rid_to_state.pop(rid, None) if reason else None
            if state is not None and state.obj.lora_path:
                await self.lora_registry.release(state.obj.lora_id)

    # As hooked -----------------------------------------------------------------------------------------------------

    def abort(self, rid: str, reason: dict[str, object] | None = None) -> None:
        adapter_uses.aborted_in_queue(Manager.aborted, self, SimpleNamespace(rid=rid, finished_reason=reason))

    def give_up(self, obj: Any) -> None:
        adapter_uses.given_up(Manager.given_up, self, obj, None)

    async def answer(self, *ends: tuple[str, str | None]) -> None:
        rids, reasons = zip(*ends, strict=True)
        await adapter_uses.ended_unheard(Manager.output, self, SimpleNamespace(rids=rids, finished_reasons=reasons))

    async def uses(self) -> int:
        await asyncio.sleep(0)
        return self.lora_registry.uses["a"]


@pytest.fixture
def manager() -> Manager:
    return Manager()


async def test_a_request_that_is_aborted_while_it_is_queued_uses_its_adapter_no_more(manager: Manager) -> None:
    manager.begin("r")
    manager.begin("plain", adapter=None)
    manager.abort("plain")
    assert await manager.uses() == 1
    manager.abort("r")
    assert await manager.uses() == 0
    manager.abort("r")
    assert await manager.uses() == 0, "an abort that comes late ends no other request's use"


@pytest.mark.parametrize("code", [500, 503])
async def test_a_use_that_sglang_ends_itself_is_left_to_it(code: int, manager: Manager) -> None:
    manager.begin("r")
    manager.abort("r", {"type": "abort", "status_code": code})
    assert await manager.uses() == 1


async def test_a_request_whose_caller_is_gone_uses_its_adapter_until_the_scheduler_has_ended_it(
    manager: Manager,
) -> None:
    running, queued, heard = (manager.begin(rid) for rid in ("running", "queued", "heard"))
    for one in (running, queued):
        manager.give_up(one)
    assert await manager.uses() == 3, "the scheduler may still read the adapter"
    await manager.answer(("running", None), ("heard", None))
    assert await manager.uses() == 3
    await manager.answer(("running", "abort"), ("heard", "stop"))
    assert await manager.uses() == 1
    manager.abort("queued")
    assert await manager.uses() == 0
    manager.give_up(heard)
    assert await manager.uses() == 0


async def test_a_request_that_was_never_sent_uses_its_adapter_no_more(manager: Manager) -> None:
    manager.give_up(manager.begin("r", dispatched=False))
    assert await manager.uses() == 0
