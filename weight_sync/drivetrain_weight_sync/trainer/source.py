"""Sources of a push: a module, a mapping, or named tensors read one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, cast

import torch
from torch import nn

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest, WeightPlanMismatch, WeightSyncError
from drivetrain.types.weights import WeightManifest
from drivetrain_weight_sync.shards.pieces import WeightShard, is_sharded
from drivetrain_weight_sync.tensors.checkpoint_names import base_name, unwrapped
from drivetrain_weight_sync.tensors.derived_tensor import DerivedTensor
from drivetrain_weight_sync.tensors.stacked_experts import by_checkpoint_name
from drivetrain_weight_sync.trainer.held_policy import held_policy
from drivetrain_weight_sync.trainer.in_memory_names import InMemoryNames
from drivetrain_weight_sync.trainer.merged_adapters import AdaptedModule, MergedAdapters

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

NamedTensors = Iterable[tuple[str, torch.Tensor]]
NamedShards = Iterable[tuple[str, torch.Tensor | WeightShard]]


class Actor(Protocol):
    """An object of a trainer that holds the policy, and no other module that has tensors."""

    @property
    def model(self) -> nn.Module: ...


WeightInput = nn.Module | Actor | Mapping[str, torch.Tensor | WeightShard] | NamedShards | Callable[[], NamedShards]


class Source:
    """Named tensors, under their checkpoint names.

    A module or a mapping is *held*: its tensors keep their values during a push. (name, tensor) pairs are *streamed*:
    they are read once per push, and a tensor may be overwritten as soon as the next one is read. A generator can be
    read only once; a function that returns one can be read at every push.

    An object that can be iterated over, or called without arguments, yields pairs even if it holds a module: if it is
    an actor all the same, the push fails, whereas a module in the place of pairs would be served.

    Args:
        given: The trainer's source.
        names: Translates names of the transformers model in memory.
        outline: Returns every tensor that will be streamed, on the meta device, where that is known before.
    """

    def __init__(
        self,
        given: WeightInput,
        names: InMemoryNames | None = None,
        outline: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        self._given, self._function = _read_as(given)
        self._names = names
        self._outline = outline
        self._spent = False
        self._adapted: AdaptedModule | None = None
        """Adapters of a module, as they were when :meth:`shards` was called last."""
        self._unchanged: tuple[list[str], WeightManifest] | None = None
        """Names of a mapping that are the manifest's own, and that manifest."""

    @property
    def held(self) -> bool:
        """True if the tensors keep their values during a push."""
        return isinstance(self._given, nn.Module | Mapping)

    @property
    def sharded(self) -> bool:
        """True if a tensor of a held source is a DTensor or a :class:`WeightShard`."""
        return self.held and any(is_sharded(tensor) for tensor in self._values())

    @property
    def gpu(self) -> torch.device | None:
        """Device of a held source's first GPU tensor; None if it has none, or if the source is streamed."""
        tensors = (value.tensor if isinstance(value, WeightShard) else value for value in self._values())
        return next((tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda), None)

    def _values(self) -> Iterable[object]:
        if isinstance(self._given, nn.Module):
            return self._given.parameters()
        return self._given.values() if isinstance(self._given, Mapping) else ()

    def pairs(self, manifest: WeightManifest | None = None) -> list[tuple[str, torch.Tensor | DerivedTensor]]:
        """Return the tensors of a held source as given; :func:`by_name` checks and names them.

        Weights that adapters of peft change are computed when they are needed. With the engine's ``manifest``, a
        transformers model's in-memory names become checkpoint names where the mapping is certain.
        """
        # Looking up thousands of names takes time. If the last push needed no translation, equal names need none.
        if isinstance(self._given, Mapping) and (list(self._given), manifest) == self._unchanged:
            return list(self._given.items())
        merging = MergedAdapters()
        pairs = self._named_as_stored(list(self._checkpoint_pairs(merging)), manifest)
        return [(name, merging.resolved(tensor)) for name, tensor in pairs] if merging else [*pairs]

    def _named_as_stored(
        self, pairs: list[tuple[str, torch.Tensor]], manifest: WeightManifest | None
    ) -> list[tuple[str, torch.Tensor]]:
        if self._names is None or manifest is None:
            return pairs
        named = {unwrapped(name): tensor for name, tensor in pairs if isinstance(tensor, torch.Tensor)}
        if len(named) != len(pairs):
            return pairs
        stored = self._names.stored(named, manifest)
        if isinstance(self._given, Mapping) and list(stored) == list(self._given):
            self._unchanged = (list(stored), manifest)
        return list(stored.items())

    def shards(self) -> Iterator[tuple[str, object]]:
        """Yield names and tensors, of which any may be a DTensor or a :class:`WeightShard`.

        The tensors of adapters that are not merged are among them.

        Raises:
            WeightSyncError: an adapter is not merged and cannot be merged here.
        """
        given = self._given
        if not isinstance(given, nn.Module):
            return iter(self._pairs())
        pairs = _state_of(given)
        self._adapted = AdaptedModule.of(given)
        return iter(pairs if self._adapted is None else self._adapted.needed(pairs))

    def gathered_with(self, name: str) -> str | None:
        """Return the name of the layer whose tensors must all be gathered at once with this one of :meth:`shards`."""
        return None if self._adapted is None else self._adapted.owner(name)

    @torch.no_grad()
    def whole(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Merge, name and split tensors that were gathered from :meth:`shards` as the checkpoint does.

        Raises:
            WeightSyncError: peft cannot merge an adapter.
        """
        if not isinstance(self._given, nn.Module):
            return tensors
        merged = tensors if self._adapted is None else self._adapted.merged(tensors)
        return by_checkpoint_name(self._given, merged)

    def outline(self, manifest: WeightManifest) -> Mapping[str, torch.Tensor] | None:
        """Return all tensors of a streamed source on the meta device; None if they are known only once it is read."""
        if self._outline is None:
            return None
        outline = self._outline()
        return outline if self._names is None else self._names.stored(outline, manifest)

    def stream(self, manifest: WeightManifest | None = None) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the tensors in groups, each valid until the next one is read; for ``manifest`` see :meth:`pairs`.

        Raises:
            InvalidRequest: the source does not yield (name, tensor) pairs.
            WeightSyncError: a generator was read before, or an item is not a dense tensor with memory.
        """
        for group in self._groups():
            pairs = list(_checked(group))
            if self._names is not None and manifest is not None:
                stored = [self._names.stored({name: tensor}, manifest) for name, tensor in pairs]
                pairs = [pair for tensors in stored for pair in tensors.items()]
            yield pairs

    def _groups(self) -> Iterable[NamedTensors]:
        return ([pair] for pair in self._pairs())

    def _checkpoint_pairs(self, merging: MergedAdapters) -> NamedTensors:
        given = self._given
        if not isinstance(given, nn.Module):
            return self._pairs()
        pairs = merging.pairs(given, _state_of(given))
        named = {unwrapped(name): tensor for name, tensor in pairs}
        return by_checkpoint_name(given, named).items() if len(named) == len(pairs) else pairs

    def _pairs(self) -> NamedTensors:
        given = self._given
        if isinstance(given, Mapping):
            return _without_wrappers(_named(given.items()))
        if self._function is not None:
            return _named(self._function())
        assert isinstance(given, Iterable)
        if isinstance(given, Iterator):
            if self._spent:
                raise WeightSyncError(
                    "the generator given as source was read by an earlier push and is empty now; to push more than "
                    "once, pass a function that returns a new one, such as model.named_parameters without its ()"
                )
            self._spent = True
        return _named(given)


class GatheredSource(Source):
    """A streamed source that yields whole buckets, gathered from several ranks.

    Args:
        buckets: Yields the tensors of one bucket after the other; they stay valid until the next one is read.
        names: As for :class:`Source`.
        outline: As for :class:`Source`.
    """

    def __init__(
        self,
        buckets: Callable[[], Iterable[Mapping[str, torch.Tensor]]],
        names: InMemoryNames,
        outline: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        super().__init__((), names, outline)
        self._buckets = buckets

    def _groups(self) -> Iterable[NamedTensors]:
        return (bucket.items() for bucket in self._buckets())


def _read_as(given: object) -> tuple[WeightInput, Callable[[], object] | None]:
    """Return the source to read, and the function that returns its pairs if there is one.

    Raises:
        InvalidRequest: ``given`` is no source, or may be an actor as well as a function that returns pairs.
    """
    if isinstance(given, nn.Module | Mapping):
        return cast("WeightInput", held_policy(given)), None
    if callable(given) and not _needs_arguments(given):
        if _takes_any_arguments(given) and held_policy(given) is not given:
            raise InvalidRequest(
                f"source is a {type(given).__name__} that holds a module, and can be called with any arguments; pass "
                "the module itself, or a function without arguments that returns (name, tensor) pairs",
                field="source",
            )
        return cast("WeightInput", given), given
    held = given if isinstance(given, Iterable) else held_policy(given)
    if not isinstance(held, nn.Module | Iterable):
        wants = " that cannot be called without arguments" if callable(given) else ""
        raise InvalidRequest(
            f"source is a {type(given).__name__}{wants}; give a torch module or an object that holds one, a mapping of "
            "names to tensors, (name, tensor) pairs, or a function without arguments that returns such pairs",
            field="source",
        )
    return cast("WeightInput", held), None


def _needs_arguments(function: Callable[..., object]) -> bool:
    return any(one.default is one.empty and one.kind not in _REST for one in _parameters(function))


def _takes_any_arguments(function: Callable[..., object]) -> bool:
    return any(one.kind in _REST for one in _parameters(function))


def _parameters(function: Callable[..., object]) -> Iterable[inspect.Parameter]:
    try:
        return inspect.signature(function).parameters.values()
    except ValueError:  # some functions of C do not tell
        return ()


def by_name(pairs: Iterable[tuple[str, torch.Tensor | DerivedTensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors of a held source by their checkpoint names, but those that are derived.

    Raises:
        WeightPlanMismatch: two tensors have one name once wrappers' prefixes are dropped.
        WeightSyncError: an item is not a dense tensor with memory.
    """
    named: dict[str, torch.Tensor] = {}
    for name, tensor in _checked((name, value) for name, value in pairs if not isinstance(value, DerivedTensor)):
        if name in named:
            raise WeightPlanMismatch(f"the source holds {name} twice; give each tensor once", extra=[name])
        named[name] = tensor
    return named


def _state_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    state = module.state_dict(keep_vars=True)
    return [(name, tensor) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)]


def _without_wrappers(pairs: NamedTensors) -> NamedTensors:
    """Rename a peft model's base tensors to checkpoint names; change nothing if adapter tensors are among them."""
    held = list(pairs)
    names = [base_name(name) for name, _ in held]
    if None in names:
        return held
    return [(name or "", tensor) for name, (_, tensor) in zip(names, held, strict=True)]


def _named(pairs: object) -> NamedTensors:
    """Yield the pairs of a source, refusing items that are not pairs; :func:`_checked` checks their tensors."""
    if not isinstance(pairs, Iterable):
        raise _no_pairs(pairs)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise _no_pairs(pair)
        yield pair[0], pair[1]


def _no_pairs(value: object) -> InvalidRequest:
    return InvalidRequest(
        f"source yields {shown(value)}; expected (name, tensor) pairs; of an actor, pass the module that it holds",
        field="source",
    )


def _checked(pairs: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in pairs:
        if isinstance(tensor, WeightShard):
            raise WeightSyncError(
                f"{name} is a WeightShard, which several ranks push together; pass "
                "group=torch.distributed.group.WORLD to WeightSync.connect on each of them"
            )
        if not isinstance(tensor, torch.Tensor):
            raise WeightSyncError(f"{name} is a {type(tensor).__name__}; give a torch.Tensor")
        _require_plain(name, tensor)
        yield unwrapped(name), tensor.detach()


def _require_plain(name: str, tensor: torch.Tensor) -> None:
    if is_sharded(tensor):
        raise WeightSyncError(
            f"{name} is a DTensor, which several ranks push together; pass group=torch.distributed.group.WORLD to "
            "WeightSync.connect on each of them"
        )
    if tensor.is_meta:
        raise WeightSyncError(f"{name} is on the meta device and holds no values; pass a tensor that has memory")
    if tensor.layout is not torch.strided:
        raise WeightSyncError(f"{name} has layout {tensor.layout}; pass a dense tensor (to_dense())")
