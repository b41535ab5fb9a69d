"""An engine that says given texts, on a model whose chat template has tools and reasoning."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from drivetrain import EngineConfig, InferenceEngine
from drivetrain.backend.base import Backend, EngineStats, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.types.capability import Capability
from drivetrain.types.config import Isolation
from drivetrain.types.outputs import FinishReason, VersionSpan
from drivetrain.types.routed_experts import RoutedExperts
from drivetrain.types.sampling import StructuredOutput

END: Final = 258
MERGED: Final = 0
"""Id of ``he``: the tokenizer writes it for these two characters, and the engine never samples it."""
TEMPLATE: Final = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% set ns = namespace(text=message.content or '') %}"
    "{% if message.role == 'assistant' and drop_reasoning is defined %}"
    "{% if drop_reasoning == 'always' or not loop.last %}{% set ns.text = ns.text.split('</think>')[-1] %}{% endif %}"
    "{% endif %}"
    "{% if trimmed is defined %}{% set ns.text = ns.text | trim %}{% endif %}"
    "{% if opened is defined and message.role == 'assistant' and loop.last %}"
    "{% set ns.text = '<think></think>' + ns.text %}{% endif %}"
    "{% if strict is defined and message.role == 'tool' and messages[loop.index0 - 1].role != 'tool' %}"
    "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('a result without a call') }}{% endif %}"
    "{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + ns.text }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL: Final = '<tool_call>{"name" : "add", "arguments" :  {"b": [12], "a": 1}}</tool_call>'


class ScriptedBackend(Backend):
    """Generates given texts, byte by byte. A text that ends with ``…`` is cut off by its length.

    It claims structured output, and trusts the test to give texts that follow the grammar.
    """

    name = "scripted"
    engine_distribution = "pytest"
    says: Sequence[str] = ()
    grammar: StructuredOutput | None = None
    """Grammar of the last request."""

    @classmethod
    def capabilities(cls, config: EngineConfig) -> frozenset[Capability]:
        return frozenset(
            {
                *(Capability.STREAMING, Capability.ABORT, Capability.LOGPROBS_TEMPERATURE, Capability.ROUTED_EXPERTS),
                Capability.STRUCTURED_JSON,
            }
        )

    async def start(self, report: Callable[[str], None]) -> ModelInfo:
        return ModelInfo(260, 4096, (END,), "float32", "scripted", 0, "cpu")

    async def close(self) -> None:
        pass

    async def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        text, *self.says = self.says
        self.grammar = request.params.structured_output
        cut = text.endswith("…")
        ids = [*text.removesuffix("…").encode(), *([] if cut else [END])]
        experts = [[[token_id]] for token_id in ids]
        return GenerateResult(
            ids,
            FinishReason.LENGTH if cut else FinishReason.STOP,
            [VersionSpan("initial", 0, len(ids))] if ids else [],
            matched_stop=None if cut else END,
            logprobs=[-float(token_id) for token_id in ids],
            routed_experts=RoutedExperts.of(experts) if request.params.return_routed_experts else None,
        )

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        result = await self.generate(request)
        for token_id, logprob in zip(result.token_ids, result.logprobs or (), strict=True):
            yield TokenDelta([token_id], logprobs=[logprob])
        yield TokenDelta([], logprobs=[], result=result)


@asynccontextmanager
async def scripted_engine(model: Path, folder: Path) -> AsyncIterator[tuple[InferenceEngine, ScriptedBackend]]:
    """Start an engine on a copy of ``model`` in ``folder``, which has :data:`TEMPLATE` and :data:`MERGED`."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    del vocabulary[next(token for token, token_id in vocabulary.items() if token_id == MERGED)]
    vocabulary["he"] = MERGED
    tokenizer["model"]["merges"].append(["h", "e"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = EngineConfig(backend="scripted", model=str(folder))
    backend = ScriptedBackend(config)
    capabilities = ScriptedBackend.capabilities(config)
    engine = InferenceEngine(config, backend, capabilities=capabilities, isolation=Isolation.INLINE, versions={})
    async with engine:
        yield engine, backend
