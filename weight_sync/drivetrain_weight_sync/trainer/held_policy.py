"""Find the policy in an object that a trainer wraps it with."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from torch import nn

from drivetrain.errors import InvalidRequest
from drivetrain_weight_sync.tensors.checkpoint_names import listed, unwrapped


def held_policy(source: object) -> object:
    """Return the module that an actor holds; return any other source as it is.

    An actor is an object that has one module as an attribute, or a module in which one model of transformers or peft
    holds every tensor.

    Raises:
        InvalidRequest: the object has several modules.
    """
    if isinstance(source, nn.Module):
        return _model_in(source)
    if isinstance(source, Mapping | Iterable) or callable(source):
        return source
    held = {name: value for name, value in getattr(source, "__dict__", {}).items() if isinstance(value, nn.Module)}
    if len(held) > 1:
        raise InvalidRequest(
            f"source is a {type(source).__name__} with several modules ({listed(held)}); pass the one that the engine "
            "serves",
            field="source",
        )
    return next((_model_in(module) for module in held.values()), source)


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
    if not kept or not path or any(not name.startswith(f"{outer}.") for name in module.state_dict()):
        return module
    return module.get_submodule(outer)
