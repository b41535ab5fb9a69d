"""Methods of the wire protocol, derived from the pages ``Backend`` and ``SharedEngine``."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Final, Union, get_args, get_origin, get_type_hints

import msgspec

from drivetrain.backend.base import Backend
from drivetrain.errors import WireError
from drivetrain.process.codec import Codec, codec_for
from drivetrain.process.shared_engine import SharedEngine

_LOCAL: Final = frozenset({"died"})
"""Not called over the wire: the host reports an engine's death as ``Fatal``."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One positional argument of a method."""

    name: str
    annotation: object
    codec: Codec


@dataclass(frozen=True, slots=True)
class Method:
    """One coroutine of a page, or its async generator, as a method of the wire protocol."""

    name: str
    arguments: tuple[Argument, ...]
    annotation: object
    """Type of the result, or of each item of a stream."""
    result: Codec
    streams: bool
    signature: inspect.Signature

    def pack(self, arguments: Sequence[object]) -> tuple[msgspec.Raw, ...]:
        """Encode arguments, one each.

        Raises:
            WireError: one of them cannot cross.
        """
        return tuple(argument.codec.encode(value) for argument, value in zip(self.arguments, arguments, strict=True))

    def unpack(self, packed: Sequence[msgspec.Raw]) -> list[object]:
        """Decode arguments.

        Raises:
            WireError: there are too few or too many, or one is not what its annotation says.
        """
        if len(packed) != len(self.arguments):
            raise WireError(f"{self.name} takes {len(self.arguments)} arguments, not {len(packed)}")
        try:
            return [argument.codec.decode(data) for argument, data in zip(self.arguments, packed, strict=True)]
        except WireError as error:
            raise WireError(f"cannot read the arguments of {self.name}: {error}") from error

    def __str__(self) -> str:
        """Return the method's signature in one line, as listed in ``docs/reference/wire.md``."""
        arguments = ", ".join(f"{argument.name}: {_shown(argument.annotation)}" for argument in self.arguments)
        return f"{self.name}({arguments}) -> {'items of ' if self.streams else ''}{_shown(self.annotation)}"


def method_table(page: type) -> dict[str, Method]:
    """Derive all methods from the annotations of a class, by name."""
    table = {}
    for name, function in vars(page).items():
        if name.startswith("_") or name in _LOCAL or not inspect.isfunction(function):
            continue
        streams = get_origin(get_type_hints(function)["return"]) in (AsyncIterator, AsyncGenerator)
        if streams or inspect.iscoroutinefunction(function):
            table[name] = method_of(function)
    return table


def method_of(function: Callable[..., object]) -> Method:
    """Derive one method from its annotations.

    Callables, such as ``start``'s ``report``, are not sent; the host sends ``Progress`` messages instead of calling
    them.
    """
    hints = get_type_hints(function)
    returned = hints.pop("return")
    streams = get_origin(returned) in (AsyncIterator, AsyncGenerator)
    arguments = tuple(
        Argument(argument, annotation, codec_for(annotation))
        for argument, annotation in hints.items()
        if get_origin(annotation) is not Callable
    )
    result = get_args(returned)[0] if streams else returned
    return Method(function.__name__, arguments, result, codec_for(result), streams, inspect.signature(function))


def _shown(annotation: object) -> str:
    if isinstance(annotation, type) and not get_args(annotation):
        return "None" if annotation is type(None) else annotation.__name__
    if annotation is Ellipsis:
        return "..."
    members = get_args(annotation)
    if not members:
        return str(annotation)
    shown = [_shown(member) for member in members]
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return " | ".join(shown)
    return f"{getattr(origin, '__name__', origin)}[{', '.join(shown)}]"


METHODS: Final = method_table(Backend)
"""Methods of a host that a trainer calls, by name."""
SHARED_METHODS: Final = method_table(SharedEngine)
"""Methods of an engine's owner that a holder calls, by name."""
