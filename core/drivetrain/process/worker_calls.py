"""Calls of a worker inside an engine: the messages of the wire protocol as bytes, which also pass an engine's own RPC.

Exceptions of the worker become failures: one that reached the engine could end it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from drivetrain.errors import DrivetrainError, EngineInternalError, WireError
from drivetrain.process.rpc_methods import METHODS, Method, method_of
from drivetrain.process.wire import Call, Failure, FromHost, Reply, encode, from_host, from_trainer, read
from drivetrain.process.wire_errors import exception, failure
from drivetrain.types.modes import PauseMode
from drivetrain.types.weights import ApplyUpdate


class CallNotTaken(Exception):
    """The engine's process could not call the worker; the message is the error that it saw."""


class FailedElsewhere(Exception):
    """Another rank failed in a call that all ranks take together; its own failure carries the reason."""


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """A call as its receiver sees it."""

    id: int
    method: Method
    arguments: list[object]

    @property
    def freeze(self) -> PauseMode | None:
        """Freezes requests in this way while the call runs; None: requests go on."""
        return next((argument.freeze for argument in self.arguments if isinstance(argument, ApplyUpdate)), None)


class WorkerMethods:
    """The methods that a worker answers to: those of the ``Backend`` page, and its own.

    Args:
        own: Functions of the worker's class that the page does not have.
    """

    def __init__(self, *own: Callable[..., object]) -> None:
        self._methods: Mapping[str, Method] = {
            **METHODS,
            **{function.__name__: method_of(function) for function in own},
        }

    def __getitem__(self, name: str) -> Method:
        return self._methods[name]

    def call(self, name: str, arguments: tuple[object, ...]) -> bytes:
        """Encode a call that is sent over an engine's own RPC."""
        return encode(Call(0, name, self._methods[name].pack(arguments)))

    @staticmethod
    def name_of(payload: bytes) -> str:
        """Return the name of the method that a call is for."""
        return _read_call(payload).method

    def read(self, payload: bytes) -> WorkerCall:
        """Decode a call.

        Raises:
            WireError: it is for no known method, or its arguments cannot be read.
        """
        call = _read_call(payload)
        if call.method not in self._methods:
            raise WireError(f"the worker has no method {call.method!r}")
        method = self._methods[call.method]
        return WorkerCall(call.id, method, method.unpack(call.arguments))

    def answer(
        self,
        worker: object,
        payload: bytes,
        gather: Callable[[Failure | str], list[Failure | str]] | None = None,
    ) -> bytes:
        """Do :meth:`read` and :meth:`serve`, and encode the answer."""
        try:
            call = self.read(payload)
        except WireError as error:  # the same on every rank
            return encode(self.not_taken(payload, error))
        return encode(self.serve(worker, call, gather))

    @staticmethod
    def serve(
        worker: object,
        call: WorkerCall,
        gather: Callable[[Failure | str], list[Failure | str]] | None = None,
    ) -> Reply | Failure:
        """Call the worker, and return its answer.

        Args:
            worker: The object that has the method.
            call: The call.
            gather: Exchanges, between ranks that take each call together, each rank's failure or what its
                ``rank_state()`` returns. All answer with the first failure, or fail if their states differ. None: there
                is one rank.
        """
        answer: Reply | Failure = Reply(call.id, _NOTHING)
        try:
            result = getattr(worker, call.method.name)(*call.arguments)
            answer = Reply(call.id, call.method.result.encode(result))
        except FailedElsewhere:
            pass  # all ranks answer with the other one's failure
        except Exception as error:
            answer = failure(call.id, error)
        if gather is not None:
            told = gather(answer if isinstance(answer, Failure) else _state_of(worker))
            for rank, one in enumerate(told):
                if isinstance(one, Failure):
                    return msgspec.structs.replace(one, message=f"rank {rank}: {one.message}")
            if len(set(told)) > 1:
                states = "; ".join(f"rank {rank}: {state}" for rank, state in enumerate(told))
                return failure(call.id, EngineInternalError(f"the ranks differ after {call.method.name}: {states}"))
        return answer

    @staticmethod
    def not_taken(payload: bytes, error: Exception) -> Failure:
        """Return the answer to a call that did not reach its worker."""
        call_id = _read_call(payload).id
        if isinstance(error, DrivetrainError):
            return failure(call_id, error)
        return Failure(call_id, CallNotTaken.__name__, f"{type(error).__name__}: {error}", {})

    def result_of(self, name: str, payload: bytes) -> object:
        """Decode the result of a call that was sent over an engine's own RPC.

        Raises:
            DrivetrainError: the method's error.
        """
        answer: FromHost = read(from_host, memoryview(payload))
        if isinstance(answer, Failure):
            raise exception(answer)
        if not isinstance(answer, Reply):
            raise EngineInternalError(f"the worker answered {name} with a {type(answer).__name__}")
        return self._methods[name].result.decode(answer.result)


def _state_of(worker: object) -> str:
    state = getattr(worker, "rank_state", None)
    return "" if state is None else str(state())


def _read_call(payload: bytes) -> Call:
    message = read(from_trainer, memoryview(payload))
    if not isinstance(message, Call):
        raise WireError(f"the worker got a {type(message).__name__}, not a call")
    return message


_NOTHING: Final = msgspec.Raw(encode(None))
