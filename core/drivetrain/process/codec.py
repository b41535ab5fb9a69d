"""Encoding of typed values to msgpack, for all types of the ``Backend`` page.

msgspec handles builtins, enums and dataclasses. Pydantic models are sent as maps and validated by their model on
arrival. A union of several classes, which msgspec cannot tell apart, is sent as (class name, value).
"""

from __future__ import annotations

import dataclasses
import operator
import types
from abc import ABC, abstractmethod
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import msgspec
from pydantic import BaseModel

from drivetrain.backend.base import GenerateRequest
from drivetrain.errors import WireError
from drivetrain.types.prompts import MediaInput
from drivetrain.types.sampling import SamplingParams


class Codec(ABC):
    """Encoder and decoder of one type's values."""

    @abstractmethod
    def encode(self, value: object) -> msgspec.Raw:
        """Return the value as msgpack.

        Raises:
            WireError: The value is not of the annotated type and cannot be encoded.
        """

    @abstractmethod
    def decode(self, data: msgspec.Raw) -> object:
        """Return the decoded value.

        Raises:
            WireError: The bytes do not hold such a value.
        """


def codec_for(annotation: object) -> Codec:
    """Return the codec of an annotation.

    Raises:
        TypeError: Values of that type cannot be encoded; do not use the type on the ``Backend`` page.
    """
    if annotation is GenerateRequest:
        return _requests
    members = get_args(annotation)
    if get_origin(annotation) is tuple and len(members) == 2 and members[1] is Ellipsis:
        member = codec_for(members[0])
        if isinstance(member, _OneOf):
            return _Several(member)
    if get_origin(annotation) in (Union, types.UnionType) and sum(_is_model(member) for member in members) > 1:
        return _OneOf(members)
    return _Typed(annotation)


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and (
        issubclass(annotation, BaseModel) or hasattr(annotation, "__dataclass_fields__")
    )


def _dump(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="python")
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot cross the wire")


def _load(expected: type, value: object) -> object:
    if issubclass(expected, BaseModel):
        return expected.model_validate(value)
    raise TypeError(f"{expected!r} is no type that crosses the wire")


_encode: Final = msgspec.msgpack.Encoder(enc_hook=_dump).encode


def _to_wire(value: object) -> msgspec.Raw:
    try:
        return msgspec.Raw(_encode(value))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"a {type(value).__name__} cannot cross the wire: {error}") from error


class _Typed(Codec):
    def __init__(self, annotation: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(annotation, dec_hook=_load)

    def encode(self, value: object) -> msgspec.Raw:
        return _to_wire(value)

    def decode(self, data: msgspec.Raw) -> object:
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise WireError(str(error)) from error


class _Named(msgspec.Struct, array_like=True, frozen=True):
    name: str
    value: msgspec.Raw


_named: Final = msgspec.msgpack.Decoder(_Named)


class _OneOf(Codec):
    def __init__(self, members: tuple[object, ...]) -> None:
        self._members = {member.__name__: codec_for(member) for member in members if isinstance(member, type)}
        if len(self._members) != len(members):
            raise TypeError(f"every member of a union that crosses the wire must be a class of its own name: {members}")

    def encode(self, value: object) -> msgspec.Raw:
        name = type(value).__name__
        if name not in self._members:
            raise WireError(f"a {name} cannot cross here; expected one of: {', '.join(self._members)}")
        return _to_wire(_Named(name, self._members[name].encode(value)))

    def decode(self, data: msgspec.Raw) -> object:
        try:
            named = _named.decode(data)
        except (msgspec.MsgspecError, ValueError) as error:
            raise WireError(str(error)) from error
        if named.name not in self._members:
            raise WireError(f"got a {named.name!r}; expected one of: {', '.join(self._members)}")
        return self._members[named.name].decode(named.value)


_items: Final = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...])


class _Several(Codec):
    """Codec of a tuple of any length."""

    def __init__(self, member: Codec) -> None:
        self._member = member

    def encode(self, value: object) -> msgspec.Raw:
        if not isinstance(value, tuple):
            raise WireError(f"a {type(value).__name__} cannot cross here; expected a tuple")
        return _to_wire(tuple(map(self._member.encode, value)))

    def decode(self, data: msgspec.Raw) -> object:
        try:
            items = _items.decode(data)
        except (msgspec.MsgspecError, ValueError) as error:
            raise WireError(str(error)) from error
        return tuple(map(self._member.decode, items))


# The hot one ---------------------------------------------------------------------------------------------------------


_FIELDS: Final = tuple(field.name for field in dataclasses.fields(GenerateRequest))
_PARAMS: Final = _FIELDS.index("params")
_MEDIA: Final = _FIELDS.index("media")
_PACKED: Final = {"params": msgspec.Raw, "media": tuple[msgspec.Raw, ...]}
"""Fields whose values are encoded before the request is."""
_hints: Final = get_type_hints(GenerateRequest)
_Request: Final[Any] = msgspec.defstruct(
    "_Request",
    [(name, _PACKED.get(name, _hints[name])) for name in _FIELDS],
    array_like=True,
    frozen=True,
    gc=False,
)
"""``GenerateRequest`` on the wire: its fields in order."""
_values: Final = operator.attrgetter(*_FIELDS)
_request: Final = msgspec.msgpack.Decoder(_Request)
_params: Final = _Typed(SamplingParams)
_media: Final = _OneOf(get_args(MediaInput))
_PARAMS_HELD: Final = 1024


class _RequestCodec(Codec):
    """Codec of ``GenerateRequest`` that encodes and validates shared ``SamplingParams`` once.

    Most requests of a batch share one ``SamplingParams``. Encoded params are cached by identity, and only until
    :func:`forget_params`, because the dictionaries in them can be changed in place. Decoded params are cached by their
    bytes.
    """

    def __init__(self) -> None:
        self._packed: dict[int, tuple[SamplingParams, msgspec.Raw]] = {}
        self._arrived: dict[bytes, SamplingParams] = {}

    def forget_packed(self) -> None:
        self._packed.clear()

    def encode(self, value: object) -> msgspec.Raw:
        if not isinstance(value, GenerateRequest):
            raise WireError(f"a {type(value).__name__} cannot cross here; expected a GenerateRequest")
        params = value.params
        held = self._packed.get(id(params))
        if held is None:
            held = self._packed[id(params)] = (params, _params.encode(params))
        values: list[object] = list(_values(value))
        values[_PARAMS] = held[1]
        values[_MEDIA] = tuple(map(_media.encode, value.media))
        return _to_wire(_Request(*values))

    def decode(self, data: msgspec.Raw) -> GenerateRequest:
        try:
            request = _request.decode(data)
        except (msgspec.MsgspecError, ValueError) as error:
            raise WireError(str(error)) from error
        packed = bytes(request.params)
        params = self._arrived.get(packed)
        if params is None:
            decoded = _params.decode(request.params)
            assert isinstance(decoded, SamplingParams)
            if len(self._arrived) >= _PARAMS_HELD:
                self._arrived.clear()
            params = self._arrived[packed] = decoded
        values: list[Any] = list(msgspec.structs.astuple(request))
        values[_PARAMS] = params
        values[_MEDIA] = tuple(map(_decode_media, request.media))
        return GenerateRequest(*values)


def _decode_media(data: msgspec.Raw) -> MediaInput:
    media = _media.decode(data)
    assert isinstance(media, MediaInput)
    return media


_requests: Final = _RequestCodec()


def forget_params() -> None:
    """Drop the cache of encoded sampling params; called after each write to a socket."""
    _requests.forget_packed()
