"""vLLM's route to methods of its workers, limited to the methods with which SkyRL sends weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import DrivetrainError, InvalidRequest, UnsupportedCapability
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.http_layer.answers import json_answer
from drivetrain_serving.http_layer.bodies import read_fields
from drivetrain_serving.http_layer.route_docs import Fields, documented
from drivetrain_serving.vllm.answer_types import RpcResults
from drivetrain_serving.vllm.weight_transfer import UpdateInfo, WeightTransferRoutes, refusal_answer

_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "skyrl_start_weight_update": ("is_checkpoint_format",),
    "update_weights_nccl": ("update_info",),
    "update_weights_ipc": ("update_info",),
    "skyrl_finish_weight_update": (),
}
"""Methods of SkyRL's worker extension → their parameters."""


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
    """The route. A name stands for a call of the weight transfer; no method is looked up by it.

    Args:
        transfer: The weight transfer.
        config: Bounds of bodies.
    """

    def __init__(self, transfer: WeightTransferRoutes, config: ServerConfig) -> None:
        self._transfer = transfer
        self._config = config

    @documented(body=RpcFields, answer=RpcResults)
    async def collective_rpc(self, request: Request) -> Response:
        """Answer POST ``/collective_rpc`` with the result of one worker."""
        asked = await read_fields(request, self._config, RpcFields)
        try:
            await self._call(request, asked)
        except DrivetrainError as error:
            return refusal_answer(error)
        return json_answer(RpcResults(results=[None]))

    async def _call(self, request: Request, asked: RpcFields) -> None:
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
            case "update_weights_ipc":
                raise UnsupportedCapability(
                    "update_weights_ipc brings pickled handles of GPU memory, and this server unpickles nothing; let "
                    "the trainer broadcast (update_weights_nccl)"
                )


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
