"""Read LoRA adapters, and check their fields and tensors before an engine loads them.

Engines ignore unknown fields of ``adapter_config.json``, and serve tensors that do not fit.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from drivetrain.errors import InvalidRequest
from drivetrain_weight_sync.tensors.checkpoint_names import listed
from drivetrain_weight_sync.tensors.finite import non_finite
from drivetrain_weight_sync.transports.checkpoint_files import require_readable

_PREFIX: Final = "base_model.model."
_CONFIG: Final = "adapter_config.json"
_TENSORS: Final = "adapter_model.safetensors"
_UNREADABLE: Final = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)

# peft's fields -----------------------------------------------------------------------------------------------------

_SAYS_NOTHING: Final = frozenset(
    "peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode lora_dropout "
    "megatron_core runtime_config qalora_group_size loftq_config eva_config corda_config lora_ga_config".split()
)
"""Fields that do not affect the output of a trained adapter."""

_READ: Final = frozenset(
    "r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules layers_to_transform "
    "layers_pattern".split()
)
"""Fields that determine each module's rank and scale, on every engine."""

_NEUTRAL: Final[Mapping[str, Sequence[object]]] = {
    "bias": ("none",),
    # Other values (pissa, olora, corda, loftq, lora_ga) change the base weights when the adapter is made or trained.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}
"""Values of other fields, besides empty ones, that a plain adapter may have."""

_REMEDIES: Final[Mapping[str, str]] = {
    "init_lora_weights": "save it as plain LoRA (peft: path_initial_model_for_weight_conversion)",
    "bias": "train with bias='none'",
    "target_parameters": "adapt other layers than stacked experts, which take no adapter per request",
}


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter's addition to one layer: ``scale * B @ A``, with A ``[rank, inputs]`` and B ``[outputs, rank]``."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    is_embedding: bool

    @property
    def rank(self) -> int:
        """Rank of the addition."""
        return int(self.a.shape[0])


@dataclass(frozen=True, slots=True)
class GivenAdapter:
    """An adapter as a trainer gave it, not yet checked."""

    where: str
    """Name of the adapter or its folder, which begins the message of a refusal."""
    field: str
    """Field of the request that a refusal names."""
    config: Mapping[str, object]
    """Fields of ``adapter_config.json``."""
    tensors: Mapping[str, torch.Tensor]
    non_finite: Mapping[str, str]
    """Tensors with values that are not finite: ``"NaN"`` or ``"infinite"``, by name."""
    is_own: bool = False
    """True if the tensors' memory has no other user, so that an engine need not copy them."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A plain LoRA adapter that fits the model."""

    given: GivenAdapter
    modules: Mapping[str, LoraModule]
    """By the layer's name in the model."""
    rank: int
    """Largest rank of its modules."""
    scale: float
    """Most common scale of the adapter's modules; 0 if all are 0."""
    unusual: Sequence[str]
    """Fields that an engine has to honour, beyond ``r``, ``lora_alpha`` and a list of ``target_modules``."""

    @property
    def has_bias(self) -> bool:
        """True if modules add a bias."""
        return any(module.bias is not None for module in self.modules.values())


def adapter_in(path: str) -> GivenAdapter:
    """Return the adapter of a peft folder.

    Raises:
        InvalidRequest: the folder cannot be read.
    """
    where = f"lora_path={path!r}"
    try:
        require_readable(Path(path) / _CONFIG)
        config = json.loads((Path(path) / _CONFIG).read_text(encoding="utf-8"))
        config.get("peft_type")
        tensors = _tensors_of(Path(path))
        return GivenAdapter(where, "lora_path", config, tensors, non_finite(tensors))
    except _UNREADABLE as error:
        raise InvalidRequest(
            f"{where} cannot be read as a peft folder: {type(error).__name__}: {str(error)[:300]}", field="lora_path"
        ) from error


def check_adapter(
    given: GivenAdapter,
    largest_rank: int | None,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    honours: Collection[str] = (),
    base: Callable[[str], torch.Tensor] | None = None,
) -> LoraAdapter:
    """Return an adapter by module; refuse one that the engine would compute differently from peft.

    Args:
        given: The adapter.
        largest_rank: Largest rank that the engine was configured for; None: any.
        shapes: Shapes ``[outputs, inputs]`` of the model's weights that can have an adapter, by checkpoint name.
        honours: Fields of ``adapter_config.json`` that the engine honours beyond those of plain LoRA.
        base: Returns one of the engine's weights, to accept base weights saved by peft if they are equal.

    Raises:
        InvalidRequest: it is no such adapter, or one of another model; nothing was loaded.
    """
    config, kind = given.config, given.config.get("peft_type")
    if kind != "LORA":
        raise _wrong(given, f"holds an adapter of type {_brief(kind)}; requests can select only LoRA adapters")
    _check_fields(given, honours)
    if bad := given.non_finite:
        named = listed([f"{name} ({what})" for name, what in bad.items()])
        raise _wrong(given, f"holds {len(bad)} tensors with values that are not finite: {named}")
    parts = _parts(given, shapes, base)
    try:
        _check_layers(given, parts, shapes)
        modules = {name: _module(given, name, found, shapes) for name, found in parts.items()}
    except re.error as error:
        raise _wrong(
            given, f"has the pattern {_brief(error.pattern)} in {_CONFIG}, which is not a valid regex: {error}"
        ) from error
    largest = max(modules, key=lambda name: modules[name].rank)
    rank = modules[largest].rank
    if largest_rank is not None and rank > largest_rank:
        raise _wrong(given, f"has rank {rank} at {largest}, more than max_lora_rank={largest_rank}")
    scales = Counter(module.scale for module in modules.values() if module.scale).most_common(1)
    scale = scales[0][0] if scales else 0.0
    return LoraAdapter(given, modules, rank, scale, _unusual(config, modules, given.tensors))


@dataclass(frozen=True, slots=True)
class _Checked:
    """Arguments of a check that passed, and its result without the tensors."""

    key: tuple[object, ...]
    config: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]
    forms: Mapping[str, torch.Size]
    """Shapes of the adapter's tensors."""
    layers: Mapping[str, tuple[str, str, str | None]]
    """Names of each layer's tensors: A, B, and the bias."""
    adapter: LoraAdapter


class AdapterChecks:
    """Does :func:`check_adapter`, and remembers the last adapter that passed: a trainer pushes the same form each time.

    Safe from any thread.
    """

    def __init__(self) -> None:
        self._last: _Checked | None = None

    def check(
        self,
        given: GivenAdapter,
        largest_rank: int | None,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        honours: Collection[str] = (),
        base: Callable[[str], torch.Tensor] | None = None,
    ) -> LoraAdapter:
        """Return an adapter by module; arguments and errors are those of :func:`check_adapter`."""
        key, last = (largest_rank, frozenset(honours)), self._last
        forms = {name: tensor.shape for name, tensor in given.tensors.items()}
        if (
            last is not None
            and not given.non_finite
            and (last.key, last.config, last.forms, last.shapes) == (key, given.config, forms, shapes)
        ):
            return _refilled(last, given)
        adapter = check_adapter(given, largest_rank, shapes, honours=honours, base=base)
        names = {id(tensor): name for name, tensor in given.tensors.items()}
        layers = {
            layer: (names[id(own.a)], names[id(own.b)], None if own.bias is None else names[id(own.bias)])
            for layer, own in adapter.modules.items()
        }
        # A copy of a base weight beside the adapter is compared with the engine's at each push.
        if len(names) == sum(len(layer) - layer.count(None) for layer in layers.values()):
            without = replace(adapter, given=replace(given, tensors={}), modules=_without_tensors(adapter.modules))
            self._last = _Checked(key, dict(given.config), shapes, forms, layers, without)
        return adapter


def _refilled(checked: _Checked, given: GivenAdapter) -> LoraAdapter:
    tensors = given.tensors
    modules = {
        name: LoraModule(tensors[a], tensors[b], None if bias is None else tensors[bias], of.scale, of.is_embedding)
        for (name, (a, b, bias)), of in zip(checked.layers.items(), checked.adapter.modules.values(), strict=True)
    }
    return replace(checked.adapter, given=given, modules=modules)


def _without_tensors(modules: Mapping[str, LoraModule]) -> dict[str, LoraModule]:
    nothing = torch.empty(0)
    return {name: replace(module, a=nothing, b=nothing, bias=None) for name, module in modules.items()}


def named_alike(
    names: Iterable[str], namings: Sequence[Mapping[str, tuple[int, ...]]]
) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes whose names are most like those of an adapter's layers.

    Args:
        names: Names of the adapter's tensors.
        namings: Shapes of the same weights, once for each way to name them.
    """
    if len(namings) == 1:
        return namings[0]
    layers = {name.removeprefix(_PREFIX).partition(".lora_")[0] for name in names}
    return max(namings, key=lambda shapes: sum(f"{layer}.weight" in shapes for layer in layers))


# Fields ------------------------------------------------------------------------------------------------------------


def _check_fields(given: GivenAdapter, honours: Collection[str]) -> None:
    """Refuse each field whose effect the engine does not apply."""
    config = given.config
    for field, value in config.items():
        if field in _SAYS_NOTHING or field in _READ or field in honours:
            continue
        if not value or value in _NEUTRAL.get(field, ()) or _is_default(field, value):
            continue
        remedy = _REMEDIES.get(field, f"train without {field}")
        raise _wrong(
            given,
            f"has {field}={_brief(value)} in {_CONFIG}, which this engine does not apply per request; {remedy}, or "
            "merge the adapter and push all weights",
        )
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if not _is_rank(rank):
        raise _wrong(given, f"has r={_brief(rank)} in {_CONFIG}, where a whole number above 0 was expected")
    if not _is_finite(alpha):
        raise _wrong(given, f"has lora_alpha={_brief(alpha)} in {_CONFIG}, where a finite number was expected")
    for field, is_right in (("rank_pattern", _is_rank), ("alpha_pattern", _is_finite)):
        pattern = config.get(field) or {}
        if not isinstance(pattern, dict) or not all(map(is_right, pattern.values())):
            raise _wrong(given, f"has {field}={_brief(pattern)} in {_CONFIG}, where numbers by module were expected")


def _is_default(field: str, value: object) -> bool:
    """Return True if the value is the installed peft's default of a field that is unknown to us."""
    try:
        from peft import LoraConfig
    except ImportError:
        return False
    return any(
        one.name == field and one.default is not MISSING and one.default == value
        for one in fields(LoraConfig)
        if field not in _NEUTRAL
    )


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2.0**63


# Tensors -----------------------------------------------------------------------------------------------------------


def _tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / _TENSORS
    if not file.exists() and (folder / "adapter_model.bin").is_file():
        require_readable(folder / "adapter_model.bin")
        loaded = torch.load(folder / "adapter_model.bin", map_location="cpu", weights_only=True)
        return dict(loaded.items())
    if not file.exists():
        raise FileNotFoundError(f"there is no file {_TENSORS}")
    require_readable(file)
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}


def _parts(
    given: GivenAdapter,
    shapes: Mapping[str, tuple[int, ...]],
    base: Callable[[str], torch.Tensor] | None,
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of each module: ``A``, ``B``, ``embedding_A``, ``embedding_B``, ``bias``."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in given.tensors.items():
        module, lora, part = name.removeprefix(_PREFIX).rpartition(".lora_")
        part = {"A.weight": "A", "B.weight": "B", "B.bias": "bias"}.get(part, part)
        if not lora:
            _check_copy(given, name, tensor, base)
        elif f"{module}.weight" not in shapes:
            raise _wrong(
                given,
                f"has {name}, but the model has no layer {module} that a request can adapt; name layers as the model "
                "does (of a vision model, only its language model's), or merge the adapter and push all weights",
            )
        elif part not in ("A", "B", "bias", "embedding_A", "embedding_B"):
            raise _wrong(given, f"has {name}, which is not a tensor of plain LoRA")
        else:
            found.setdefault(module, {})[part] = tensor
    if not found:
        raise _wrong(given, "holds no tensors of an adapter")
    return found


def _check_copy(
    given: GivenAdapter, name: str, tensor: torch.Tensor, base: Callable[[str], torch.Tensor] | None
) -> None:
    """Accept the base embedding that peft saves beside an adapter for it, if it equals the engine's own."""
    own = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
    try:
        weight = base(own).cpu() if base is not None else None
    except (LookupError, AttributeError):
        weight = None
    same = weight is not None and weight.shape == tensor.shape and torch.equal(weight, tensor.to(weight.dtype))
    if not same:
        raise _wrong(
            given,
            f"has {name}, a weight of the model beside the adapter; save the adapter alone "
            "(peft: save_pretrained(..., save_embedding_layers=False)), or merge it and push all weights",
        )


def _check_layers(given: GivenAdapter, parts: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that the modules with tensors are those selected by ``target_modules`` and related fields."""
    config = given.config
    targets = config.get("target_modules")
    if not targets or targets in ("all-linear", "all"):
        return
    kinds = {_kind(module) for module in parts}
    named = set()
    for name in shapes:
        module = name.removesuffix(".weight")
        # A checkpoint lists experts one by one, though the trainer's model may stack them.
        if module != name and (".experts." not in name or _kind(module) in kinds) and _is_target(config, module):
            named.add(module)
    missing, surplus = named - set(parts), set(parts) - named
    if missing:
        names = listed(sorted(missing), 4)
        raise _wrong(given, f"holds no tensors for {names}, which target_modules names; save the adapter again")
    if surplus:
        names = listed(sorted(surplus), 4)
        raise _wrong(given, f"has tensors for {names}, which target_modules and layers_to_transform do not name")


def _kind(module: str) -> str:
    """Return the module's name without numbers, which is the same in every layer."""
    return ".".join(part for part in module.split(".") if not part.isdigit())


def _is_target(config: Mapping[str, object], module: str) -> bool:
    """Return True if peft would adapt the module (``check_target_module_exists``)."""
    if _matches(config.get("exclude_modules"), module):
        return False
    targets, layers = config["target_modules"], config.get("layers_to_transform")
    if not _matches(targets, module):
        return False
    if isinstance(targets, str) or layers is None or layers == []:
        return True
    patterns = config.get("layers_pattern") or r"[^.]*"
    for pattern in _strings(patterns):
        at = re.match(rf"(?:^|.*?\.){pattern}\.(?P<at>\d+)\.", module)
        if at is not None:
            return int(at["at"]) in (layers if isinstance(layers, list) else [layers])
    return False


def _matches(targets: object, module: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in _strings(targets))


def _strings(value: object) -> list[str]:
    """Return the strings of a field that holds one, several or none."""
    if isinstance(value, str):
        return [value]
    return [one for one in value if isinstance(one, str)] if isinstance(value, Iterable) else []


def _module(
    given: GivenAdapter, name: str, parts: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> LoraModule:
    config = given.config
    is_embedding = "embedding_A" in parts or "embedding_B" in parts
    first, second = ("embedding_A", "embedding_B") if is_embedding else ("A", "B")
    for part, other in ((first, second), (second, first)):
        if part not in parts:
            raise _wrong(given, f"has lora_{other} of {name} without its lora_{part}")
    rank = _by_pattern(config.get("rank_pattern"), name, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    assert isinstance(rank, int)
    assert isinstance(alpha, int | float)
    outputs, inputs = reversed(shapes[f"{name}.weight"]) if is_embedding else shapes[f"{name}.weight"]
    wanted = {first: [rank, inputs], second: [outputs, rank], "bias": [outputs]}
    for part, tensor in parts.items():
        if list(tensor.shape) != wanted.get(part):
            own = list(shapes[f"{name}.weight"])
            raise _wrong(
                given,
                f"does not fit the model: lora_{part} of {name} is {list(tensor.shape)}, where rank {rank} and the "
                f"layer's weight {own} require {wanted.get(part)}",
            )
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return LoraModule(parts[first], parts[second], parts.get("bias"), scale, is_embedding)


def _by_pattern(patterns: object, module: str, otherwise: object) -> object:
    """Return the value of the first pattern that, as in peft, matches the whole name or its end after a dot."""
    for pattern, value in (patterns if isinstance(patterns, dict) else {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def _unusual(
    config: Mapping[str, object], modules: Mapping[str, LoraModule], tensors: Collection[str]
) -> Sequence[str]:
    rank, alpha = config["r"], config.get("lora_alpha", 8)
    assert isinstance(rank, int)
    assert isinstance(alpha, int | float)
    unusual = []
    if any(module.rank != rank for module in modules.values()):
        unusual.append("rank_pattern")
    if any(module.scale != alpha / module.rank for module in modules.values()):
        unusual.append("use_rslora" if config.get("use_rslora") else "alpha_pattern")
    if not isinstance(config.get("target_modules"), list):
        unusual.append("target_modules")
    if any(".lora_" not in name for name in tensors):
        unusual.append("save_embedding_layers")
    return unusual


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _wrong(given: GivenAdapter, what: str) -> InvalidRequest:
    return InvalidRequest(f"{given.where} {what}", field=given.field)
