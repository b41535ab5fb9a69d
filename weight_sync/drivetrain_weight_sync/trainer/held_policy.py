"""Find the policy in an object that a trainer wraps it with."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from types import FunctionType, MemberDescriptorType, MethodType

from torch import nn

from drivetrain.errors import InvalidRequest
from drivetrain_weight_sync.tensors.checkpoint_names import listed, unwrapped

_NO_ACTORS = (Mapping, list, tuple, Iterator, FunctionType, MethodType)
"""Kinds of sources that are pushed as they are, whatever attributes they have."""


def held_policy(source: object, argument: str = "source") -> object:
    """Return the module that an actor holds; return any other source as it is.

    An actor is an object that has one module with tensors as an attribute, even if it can be called or iterated over;
    or a module in which one model of transformers or peft holds every tensor. Slots and a property ``model`` count as
    attributes. A module within another one that the object has, as in DDP, does not count.

    Args:
        source: The source.
        argument: Name of the caller's argument, for errors.

    Raises:
        InvalidRequest: the object has several modules with tensors.
    """
    if isinstance(source, nn.Module):
        return _model_in(source)
    if isinstance(source, _NO_ACTORS):
        return source
    held = _outermost(_with_tensors(_attributes(source)))
    if len(held) > 1:
        names = listed([name for name, _ in held])
        raise InvalidRequest(
            f"{argument} is a {type(source).__name__} with several modules ({names}); pass the one that the engine "
            "serves",
            field=argument,
        )
    return next((_model_in(module) for _, module in held), source)


def _attributes(source: object) -> dict[str, object]:
    slots = (
        name
        for kind in type(source).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, MemberDescriptorType)
    )
    named = {name: getattr(source, name, None) for name in ("model", *slots)}
    return named | getattr(source, "__dict__", {})


def _with_tensors(attributes: Mapping[str, object]) -> dict[str, nn.Module]:
    """Return each module that has a tensor once, by the last attribute that is the module."""
    found = {
        id(value): (name, value)
        for name, value in attributes.items()
        if isinstance(value, nn.Module) and any(True for _ in chain(value.parameters(), value.buffers()))
    }
    return dict(found.values())


def _outermost(modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    within = {id(part) for module in modules.values() for part in module.modules() if part is not module}
    return [(name, module) for name, module in modules.items() if id(module) not in within]


def _model_in(module: nn.Module) -> nn.Module:
    if "transformers" not in sys.modules:
        return module
    from transformers import PreTrainedModel

    kinds: tuple[type[nn.Module], ...] = (PreTrainedModel,)
    if "peft" in sys.modules:
        from peft import PeftModel

        kinds = (PreTrainedModel, PeftModel)
    path = next((name for name, part in module.named_modules() if isinstance(part, kinds)), "")
    # Keep wrappers around the model whose prefixes are dropped: FSDP1 gathers in the outermost one's state_dict().
    parts = path.split(".")
    kept = next(count for count in range(len(parts) + 1) if unwrapped(".".join([*parts[count:], "_"])) == "_")
    outer = ".".join(parts[:kept])
    if not kept or not path or not _holds_all(module, outer):
        return module
    return module.get_submodule(outer)


def _holds_all(module: nn.Module, outer: str) -> bool:
    """Return True if all tensors of the module's state are in ``outer``. No rank waits for others, as in a gather."""
    outside = [part for name, part in module.named_modules() if not f"{name}.".startswith(f"{outer}.")]
    return not any(
        {*part._buffers} - part._non_persistent_buffers_set or any(True for _ in part.parameters(recurse=False))
        for part in outside
    )
