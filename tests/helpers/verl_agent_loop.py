# pyright: reportMissingImports=false
"""verl's agent loop of one turn, which also writes the experts of each response to a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class KeepingExperts(SingleTurnAgentLoop):  # type: ignore[misc]
    """Writes to ``EXPERTS_OF_VERL``, a folder."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, priority=priority, **kwargs)
        np.savez(
            Path(os.environ["EXPERTS_OF_VERL"], uuid4().hex),
            ids=[*output.prompt_ids, *output.response_ids],
            experts=output.routed_experts,
            step=output.extra_fields["global_steps"],
        )
        return output
