# pyright: reportMissingImports=false
"""An environment of verifiers: a question, and an agent that runs in this process and adds what it is told to add."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from tool_conversation import ANSWER, QUESTION, TOOLS

__all__ = ["AddingHarness", "AddingTaskset"]


class AddingHarness(vf.Harness[vf.HarnessConfig]):
    """Ask, run the calls, and ask again until the answer has none."""

    NEEDS_CONTAINER = False
    SUPPORTS_RESUME = True

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **more: Any
    ) -> vf.ProgramResult:
        prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        messages: list[Any] = [message_to_wire(message) for message in prompt]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as api:
            while True:
                asked = {"model": ctx.model, "messages": messages, "tools": TOOLS}
                (choice,) = (await api.chat.completions.create(**asked)).choices
                messages.append(choice.message.model_dump(exclude_none=True))
                if not choice.message.tool_calls:
                    return vf.ProgramResult(0, "", "")
                for call in choice.message.tool_calls:
                    result = sum(json.loads(call.function.arguments).values())
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


class AddingTask(vf.Task[vf.TaskData]):
    """Answer with the sum."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == ANSWER)


class AddingTaskset(vf.Taskset[AddingTask, vf.TasksetConfig]):
    """One question."""

    def load(self) -> Iterable[AddingTask]:
        yield AddingTask(vf.TaskData(prompt=QUESTION))
