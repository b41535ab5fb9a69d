"""Conversion of pydantic's validation errors to one sentence: field, value, remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, get_args

from pydantic import BaseModel

from drivetrain.checks.safe_repr import is_secret, shown

if TYPE_CHECKING:
    from pydantic import ValidationError


def describe_validation_error(error: ValidationError, model: type[BaseModel], prefix: str = "") -> tuple[str, str]:
    """Return (dotted field, sentence) for pydantic's first error.

    The model's class variable ``other_names`` maps other libraries' field names to hints; ``other_values`` maps (field,
    value) to hints.
    """
    first = error.errors(include_url=False)[0]
    loc, value = first["loc"], first["input"]
    where = ".".join(shown_name(str(part)) for part in loc)
    field = f"{prefix}{where}" if where else (prefix.rstrip(".") or model.__name__)
    if first["type"] == "extra_forbidden":
        # The value is not shown: a mistyped name may hold a key.
        return shown_name(
            field
        ), f"{shown_name(field)}: there is no such field; {_hint(_model_at(model, loc[:-1]), loc)}"
    if first["type"] == "missing":
        return field, f"{field} is missing; it is required"
    message = reason_of(error)
    if not where:
        return field, f"{field}: {message}"
    meant = _meant(_model_at(model, loc[:-1]), str(loc[-1]), value)
    if any(is_secret(str(part)) for part in loc) or _is_hidden(model, str(loc[0])):
        return field, f"{field}: {message}"
    return field, f"{field}={shown(value)}: {message}{meant}"


def reason_of(error: ValidationError) -> str:
    """Return the sentence of pydantic's first error, without the field and the value."""
    return _shortened(error.errors(include_url=False)[0]["msg"].removeprefix("Value error, "), 1000)


def shown_name(name: str) -> str:
    """Return a field's name, shortened for an error message."""
    return _shortened(name, 100)


def _shortened(text: str, longest: int) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def _hint(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    name = str(loc[-1])
    other: Mapping[str, str] = getattr(model, "other_names", {})
    if name in other:
        return other[name]
    known = [field.alias or own for own, field in model.model_fields.items()]
    close = difflib.get_close_matches(name[:100], known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(known)}"


def _meant(model: type[BaseModel], name: str, value: object) -> str:
    """Return a hint for a value with another meaning in other libraries; "" if there is none."""
    if not isinstance(value, int | float | str | None):
        return ""
    other: Mapping[tuple[str, object], str] = getattr(model, "other_values", {})
    if (name, value) in other:
        return f"; {other[name, value]}"
    field = model.model_fields.get(name)
    if value is None and field is not None and not field.is_required():
        return f"; leave it out for the default, {shown(field.get_default(call_default_factory=True))}"
    return ""


def _is_hidden(model: type[BaseModel], name: str) -> bool:
    """Return True if errors must not show the field's value."""
    return name in getattr(model, "hidden_fields", ())


def _model_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the model that the error is about: ``model``, or one nested in its fields."""
    for part in loc:
        field = model.model_fields.get(str(part))
        found = list(_models_in(field.annotation)) if field else []
        model = found[0] if len(found) == 1 else model
    return model


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models of an annotation, also those of a tagged union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)
