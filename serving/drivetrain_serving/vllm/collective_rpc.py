"""vLLM's route to methods of its workers, limited to those that SkyRL's weight updates call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from drivetrain.checks.safe_repr import shown
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import DrivetrainError, InvalidRequest, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.bodies import read_fields
from drivetrain_serving.http_layer.route_docs import Fields, documented
from drivetrain_serving.vllm.answer_types import RpcResults
from drivetrain_serving.vllm.sent_adapters import SentAdapters
from drivetrain_serving.vllm.weight_transfer import UpdateInfo, WeightTransferRoutes, refusal_answer

_ABLE: Final = {MemoryTag.WEIGHTS: Capability.SLEEP_WEIGHTS, MemoryTag.KV_CACHE: Capability.SLEEP_KV_CACHE}
_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "skyrl_start_weight_update": ("is_checkpoint_format",),
    "update_weights_nccl": ("update_info",),
    "update_weights_ipc": ("update_info",),
    "skyrl_finish_weight_update": (),
    "skyrl_sleep_for_weight_sync": ("offload_kv",),
    "skyrl_wake_for_weight_sync": ("tags",),
    "skyrl_set_lora_receive_target": ("receive_target",),
    "skyrl_discard_in_memory_lora": ("lora_name",),
}
"""Methods of SkyRL's worker extension → their parameters. The first four are of 0.3.0, the others of 0.4.0."""


class RpcFields(Fields):
    """A request to ``/collective_rpc``."""

    method: object = Field(
        default=None,
        description="A method of SkyRL's worker extension. Others are refused.",
        json_schema_extra={"type": "string", "minLength": 1},
    )
    args: object = Field(
        default=None, description="Arguments by position.", json_schema_extra={"type": ["array", "null"]}
    )
    named: object = Field(
        default=None,
        validation_alias=AliasChoices("kwargs"),
        description="Arguments by name.",
        json_schema_extra={"type": ["object", "null"]},
    )


class CollectiveRpcRoute:
    """The route. A name stands for a call of the weight transfer or the engine; no method is looked up by it.

    Args:
        engine: The served engine.
        transfer: The weight transfer.
        adapters: Adapters that came by the weight transfer.
        config: Bounds of bodies.
    """

    def __init__(
        self, engine: InferenceEngine, transfer: WeightTransferRoutes, adapters: SentAdapters, config: ServerConfig
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._adapters = adapters
        self._config = config

    @documented(body=RpcFields, answer=RpcResults)
    async def collective_rpc(self, request: Request) -> Response:
        """Answer POST ``/collective_rpc`` with the result of one worker."""
        asked = await read_fields(request, self._config, RpcFields)
        try:
            result = await self._call(request, asked)
        except DrivetrainError as error:
            return refusal_answer(error)
        return json_answer(RpcResults(results=[result]))

    async def _call(self, request: Request, asked: RpcFields) -> bool | None:
        method = asked.method
        if not isinstance(method, str) or not method:
            raise InvalidRequest(f"method={shown(method)}: expected the name of a method", field="method")
        arguments = _arguments(method, asked)
        match method:
            case "skyrl_start_weight_update":
                if arguments.get("is_checkpoint_format", True) is not True:
                    raise UnsupportedCapability(
                        "is_checkpoint_format: expected true; the engine knows tensors by their names in checkpoints"
                    )
                await self._transfer.begin()
            case "update_weights_nccl":
                await self._transfer.receive(request, UpdateInfo(update_info=arguments.get("update_info")))
            case "skyrl_finish_weight_update":
                await self._transfer.commit()
            case "skyrl_sleep_for_weight_sync":
                await self._sleep(arguments.get("offload_kv", True))
            case "skyrl_wake_for_weight_sync":
                await self._engine.wake_up(_memory(arguments.get("tags")))
            case "skyrl_set_lora_receive_target":
                self._transfer.expect_adapter(arguments.get("receive_target"))
            case "skyrl_discard_in_memory_lora":
                name = arguments.get("lora_name")
                return isinstance(name, str) and await self._adapters.discard(name)
            case "update_weights_ipc":
                raise UnsupportedCapability(
                    "update_weights_ipc brings pickled handles of GPU memory, and this server unpickles nothing; let "
                    "the trainer broadcast (update_weights_nccl)"
                )
        return None

    async def _sleep(self, offload_kv: object) -> None:
        """Free weights and cache in a pause. Its requests go on afterwards, and their caches are computed again."""
        if not isinstance(offload_kv, bool):
            raise InvalidRequest(f"offload_kv={shown(offload_kv)}: expected true or false", field="offload_kv")
        if not self._engine.is_paused:
            raise InvalidRequest("memory is freed for an update in a pause only; POST /pause first")
        able = [tag for tag, capability in _ABLE.items() if self._engine.supports(capability)]
        if len(able) < len(_ABLE):
            raise UnsupportedCapability("this engine cannot free both its weights and its cache")
        await self._engine.pause_generation(PauseMode.RETRACT)
        await self._engine.sleep(able)


def _memory(tags: object) -> list[MemoryTag] | None:
    """Return the kinds of memory that SkyRL's tags name; None for all."""
    if tags is None:
        return None
    known = [tag.value for tag in _ABLE]
    if not isinstance(tags, list) or not tags or not all(tag in known for tag in tags):
        raise InvalidRequest(f"tags={shown(tags)}: expected a list of {', '.join(known)}", field="tags")
    return [MemoryTag(tag) for tag in tags]


def _arguments(method: str, asked: RpcFields) -> dict[str, object]:
    """Return the method's arguments by name.

    Raises:
        UnsupportedCapability: no method of that name is served.
        InvalidRequest: the arguments are no list or no object, or not those of the method.
    """
    parameters = _PARAMETERS.get(method)
    if parameters is None:
        raise UnsupportedCapability(f"method={shown(method)} is not served; expected one of {', '.join(_PARAMETERS)}")
    args = [] if asked.args is None else asked.args
    kwargs = {} if asked.named is None else asked.named
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise InvalidRequest("args: expected a list; kwargs: expected an object", field="kwargs")
    unknown = [*args[len(parameters) :], *(kwargs.keys() - set(parameters[len(args) :]))]
    if unknown:
        raise InvalidRequest(
            f"{method} takes ({', '.join(parameters)}), each once; it got {shown(unknown)} beside them", field="kwargs"
        )
    return {**dict(zip(parameters, args, strict=False)), **kwargs}
