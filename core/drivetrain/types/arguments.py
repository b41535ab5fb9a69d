"""Argument checks of public methods, by one decorator and one rule per parameter name.

A parameter means the same in every method: ``lora_name``, ``session_id`` and ``version`` are names, ``timeout`` is a
number of seconds. Prompts, sampling params and payloads have validators of their own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import NoneType
from typing import Any, Final, ParamSpec, TypeVar, cast, get_args

from drivetrain.checks.simple_values import (
    check_name,
    check_path,
    check_seconds,
    check_sequences,
    check_token_ids,
    refuse,
)
from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.modes import MemoryTag, PauseMode, TurnMode
from drivetrain.types.weights import CommunicatorSpec, LoraTensors, WeightPlan, WeightSource, WeightUpdateRequest

P = ParamSpec("P")
R = TypeVar("R")
Check = Callable[[str, Any], object]
"""Check of one argument: takes the parameter's name and the value; returns the value to pass on or raises
InvalidRequest."""


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        refuse(field, value, "expected True or False")
    return value


def _count(least: int) -> Check:
    def check(field: str, value: object) -> int:
        if type(value) is not int or not least <= value < 2**63:
            refuse(field, value, f"expected an integer of at least {least}, below 2**63")
        return value

    return check


def _integer(field: str, value: object) -> int:
    if type(value) is not int or not -(2**31) <= value < 2**31:
        refuse(field, value, "expected an integer of 32 bits; higher is sooner")
    return value


def _seconds_or_0(field: str, value: object) -> float:
    return 0.0 if type(value) in (int, float) and value == 0 else check_seconds(field, value)


def _share(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        refuse(field, value, "expected a number above 0 and at most 1")
    return value


def _one_of(*known: str) -> Check:
    def check(field: str, value: object) -> str:
        if not isinstance(value, str) or value not in known:
            refuse(field, value, f"expected one of {', '.join(map(repr, known))}")
        return value

    return check


def _member(kind: type[Enum], what: str) -> Check:
    def check(field: str, value: object) -> Enum:
        if isinstance(value, kind):
            return value
        found = next((member for member in kind if type(value) is str and member.value == value), None)
        if found is None:
            known = ", ".join(repr(member.value) for member in kind)
            refuse(field, value, f"there is no such {what}; expected one of {known}")
        return found

    return check


_memory_tag: Final = _member(MemoryTag, "memory tag")


def _tags(field: str, value: object) -> tuple[object, ...]:
    given = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    return tuple(_memory_tag(field, tag) for tag in given)


def _instance(kind: type[object]) -> Check:
    def check(field: str, value: object) -> object:
        if not isinstance(value, kind):
            refuse(field, value, f"it is a {type(value).__name__}; expected a {kind.__name__}")
        return value

    return check


def _callable(field: str, value: object) -> object:
    if not callable(value):
        refuse(field, value, "expected a function")
    return value


def _indices(field: str, value: object) -> object:
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        refuse(field, value, f"it is a {type(value).__name__}; expected a list of buckets' indices")
    for index in value:
        if type(index) is not int or not 0 <= index < 2**63:
            refuse(field, index, "it is no index of a bucket; expected integers of at least 0")
    return value


_PARTS_OF_AN_UPDATE: Final[Mapping[str, tuple[type[object], ...]]] = {
    "source": get_args(WeightSource),
    "mode": (PauseMode,),
    "plan": (WeightPlan, NoneType),
    "digests": (Mapping, NoneType),
    "lora": (LoraTensors, NoneType),
}


def _update(field: str, value: object) -> object:
    if not isinstance(value, WeightUpdateRequest):
        refuse(field, value, "expected a WeightUpdateRequest, which WeightSync makes")
    # Its model_copy(update=…) checks nothing, and these are used before the update is prepared.
    for part, kinds in _PARTS_OF_AN_UPDATE.items():
        if not isinstance(getattr(value, part), kinds):
            refuse(part, getattr(value, part), f"expected one of {', '.join(kind.__name__ for kind in kinds)}")
    check_name("version", value.version)
    path = getattr(value.source, "path", None)
    if value.lora_name is not None:
        check_name("source.lora_name" if value.lora is None else "lora.lora_name", value.lora_name)
    if path is not None:
        check_path("source.path", path)
    return value


def _group(field: str, value: object) -> object:
    _instance(CommunicatorSpec)(field, value)
    assert isinstance(value, CommunicatorSpec)
    check_name("group_name", value.group_name)
    check_name("master_address", value.master_address)
    check_seconds("timeout", value.timeout)
    return value


RULES: Final[Mapping[str, Check]] = {
    **dict.fromkeys(
        (
            *("lora", "lora_name", "adapter", "session_id", "parent_request_id", "request_id", "group_name"),
            *("version", "expected_version", "name", "endpoint", "url", "master_address", "listen", "key", "announce"),
        ),
        check_name,
    ),
    "timeout": check_seconds,
    "drain_timeout": _seconds_or_0,
    **dict.fromkeys(("path", "lora_path", "directory"), check_path),
    **dict.fromkeys(
        ("abort_first", "at_once", "pinned", "skip_special_tokens", "cast", "share_tensors"),
        _flag,
    ),
    "priority": _integer,
    "capacity": _count(1),
    "dimensions": _count(1),
    "top_k": _count(0),
    "bucket_bytes": _count(1),
    "staging_share": _share,
    "group_backend": _one_of("gloo", "nccl"),
    "tags": _tags,
    "mode": _member(PauseMode, "pause mode"),
    "turn": _member(TurnMode, "turn mode"),
    "capability": _member(Capability, "capability"),
    "progress": _callable,
    "token_ids": check_token_ids,
    "indices": _indices,
    "input_ids": check_sequences,
    "output_ids": check_sequences,
    "sequences": check_sequences,
    "request": _update,
    "spec": _group,
}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public method so that its arguments are checked by :data:`RULES`. A parameter's default always passes.

    The errors are raised where the method's own would be: by a coroutine when it is awaited, by an async generator when
    its first item is requested. Input nested too deeply for Python's stack raises ``InvalidRequest`` too, wherever it
    is found.
    """
    parameters = inspect.signature(function).parameters
    names = tuple(parameters)
    rules = {name: (RULES[name], parameters[name].default) for name in names if name in RULES}

    def check(arguments: tuple[object, ...], named: dict[str, Any]) -> tuple[object, ...]:
        for name in named:
            if name in rules:
                rule, default = rules[name]
                if named[name] is not default:
                    named[name] = rule(name, named[name])
        if rules.keys().isdisjoint(names[: len(arguments)]):
            return arguments
        return tuple(
            rules[name][0](name, value) if name in rules and value is not rules[name][1] else value
            for name, value in zip(names, arguments, strict=False)
        ) + arguments[len(names) :]  # fmt: skip

    called = cast("Callable[..., Any]", function)

    async def coroutine(*arguments: Any, **named: Any) -> Any:
        try:
            return await called(*check(arguments, named), **named)
        except RecursionError as error:
            raise _too_deep(function.__name__) from error

    def generator(*arguments: Any, **named: Any) -> Any:
        try:
            return called(*check(arguments, named), **named)
        except InvalidRequest as error:
            return _raising(error)

    def plain(*arguments: Any, **named: Any) -> Any:
        try:
            return called(*check(arguments, named), **named)
        except RecursionError as error:
            raise _too_deep(function.__name__) from error

    made: Callable[..., Any] = plain
    if inspect.iscoroutinefunction(function):
        made = coroutine
    elif inspect.isasyncgenfunction(function):
        made = generator
    return cast("Callable[P, R]", functools.wraps(function)(made))


async def _raising(error: InvalidRequest) -> AsyncGenerator[Any, None]:
    raise error
    yield


def _too_deep(name: str) -> InvalidRequest:
    return InvalidRequest(f"an argument of {name}() is nested too deeply to be read; flatten it")
