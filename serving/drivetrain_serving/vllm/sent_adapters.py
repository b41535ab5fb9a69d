"""Adapters whose tensors come through the weight transfer, as SkyRL sends them with ``lora.sync_mode=memory``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from pydantic import JsonValue

from drivetrain.checks.extras import from_extra
from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest, UnsupportedCapability
from drivetrain.types.capability import Capability
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_weight_sync.trainer_groups.bucket import WeightBucket

if TYPE_CHECKING:
    import torch

    from drivetrain_weight_sync import LoraSync

_FIELDS: Final = frozenset({"kind", "lora_name", "adapter_config", "aliases"})


@dataclass(slots=True)
class _Round:
    """One update that brings an adapter."""

    name: str
    config: Mapping[str, JsonValue]
    aliases: Mapping[str, str]
    """Name of a tensor that is not sent → the sent one that it equals."""
    begun: bool = False
    refusal: str = ""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sent:
    """An adapter that has come whole."""

    config: Mapping[str, JsonValue]
    tensors: Mapping[str, torch.Tensor]
    version: str | None


class SentAdapters:
    """Turns the next update of the weight transfer into an adapter, and loads it when the trainer says so.

    :meth:`expect` names the adapter; :meth:`begin`, :meth:`take` and :meth:`end` are the update, which changes nothing
    in the engine; :meth:`load` loads the adapter. An expectation holds for one update: it ends with it, also if it
    fails.

    Args:
        served: The served engine.
    """

    def __init__(self, served: ServedEngine) -> None:
        self._served = served
        self._round: _Round | None = None
        self._sent: dict[str, _Sent] = {}
        """Adapters that have come, by name, until they are discarded."""
        self._pushes: dict[str, LoraSync] = {}
        """The push of each loaded adapter. It keeps the folder from which some engines read the adapter again."""

    @property
    def expected(self) -> bool:
        """True if the next update, or the one under way, brings an adapter."""
        return self._round is not None

    def expect(self, target: object) -> None:
        """Let the next update bring an adapter.

        Args:
            target: SkyRL's ``receive_target``: ``kind`` ``"lora"``, the ``lora_name``, the ``adapter_config`` of peft,
                and ``aliases``.

        Raises:
            UnsupportedCapability: The engine takes no adapters.
            InvalidRequest: The target is no such object, or another update of an adapter is expected.
        """
        expected = _round(target)
        engine = self._served.engine
        if not (engine.supports(Capability.WEIGHTS_LORA) or engine.supports(Capability.WEIGHTS_LORA_TENSORS)):
            raise UnsupportedCapability(
                "this engine takes no adapters from a trainer; start one that does with enable_lora: true",
                capability=Capability.WEIGHTS_LORA.value,
            )
        if self._served.is_model(expected.name):
            raise InvalidRequest(f"{shown(expected.name)} is the name of the model itself", field="lora_name")
        before = self._round
        if before is not None and (before.begun or before.name != expected.name):
            raise InvalidRequest(f"an update of the adapter {shown(before.name)} is expected; finish it first")
        self._round = expected

    def forget(self) -> None:
        """Expect no adapter, and drop an update under way."""
        self._round = None

    def begin(self) -> None:
        """Open the expected update.

        Raises:
            InvalidRequest: It is open.
        """
        expected = self._expected()
        if expected.begun:
            raise InvalidRequest("an update is open; end it first")
        expected.begun = True

    def require_open(self) -> None:
        """Raise unless the expected update is open.

        Raises:
            InvalidRequest: It is not.
        """
        if not self._expected().begun:
            raise InvalidRequest("no update was started; start one first")

    def take(self, bucket: WeightBucket, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add the tensors of a bucket, which are on the CPU.

        Raises:
            InvalidRequest: A tensor came twice; the update can then only be ended, which drops it.
        """
        self.require_open()
        update = self._expected()
        names = [spec.name for spec in bucket.specs]
        twice = sorted({name for name in names if names.count(name) > 1 or name in update.tensors})
        if twice:
            update.refusal = f"{', '.join(map(shown, twice[:3]))} came twice; send each tensor of an adapter once"
            raise InvalidRequest(update.refusal, field="update_info.names")
        update.tensors.update(tensors)

    def end(self, version: str | None = None) -> None:
        """Keep the adapter of the open update for :meth:`load`, as ``version``; expect none from here on.

        Raises:
            InvalidRequest: The update is not open, was refused, brought no tensors, or an alias names none of them. The
                adapter that came before is kept.
        """
        update = self._expected()
        self._round = None
        if not update.begun:
            raise InvalidRequest("no update is open; begin one")
        if update.refusal or not update.tensors:
            why = update.refusal or "it brought no tensors"
            raise InvalidRequest(f"the adapter {shown(update.name)} is dropped: {why}")
        absent = sorted({sent for sent in update.aliases.values() if sent not in update.tensors})
        if absent:
            raise InvalidRequest(
                f"the adapter {shown(update.name)} is dropped: aliases name {', '.join(map(shown, absent[:3]))}, which "
                "did not come",
                field="receive_target.aliases",
            )
        aliases = {name: update.tensors[sent] for name, sent in update.aliases.items()}
        self._sent[update.name] = _Sent(update.config, {**update.tensors, **aliases}, version)

    def _expected(self) -> _Round:
        if self._round is None:
            raise InvalidRequest("no update of an adapter is expected; say which it is first")
        return self._round

    async def load(self, name: str) -> None:
        """Load the adapter that came last by this name; one that is loaded takes its weights.

        If requests in flight use the loaded one, all requests in flight end first, and later ones wait.

        Raises:
            InvalidRequest: None has come by this name, or the engine does not accept it.
            EngineBusy: The engine is paused, and requests that it holds use the loaded one.
            DrivetrainError: as ``LoraSync.push``. The loaded adapter keeps serving.
        """
        sent = self._sent.get(name)
        if sent is None:
            came = ", ".join(map(shown, self._sent)) or "none"
            raise InvalidRequest(
                f"no tensors of the adapter {shown(name)} have come (of: {came}); send them first", field="lora_name"
            )
        with from_extra("weight-sync", "adapters by a trainer's group"):
            from drivetrain_weight_sync import LoraSync
            from drivetrain_weight_sync.trainer.pushed_adapter import AdapterTensors

        served = self._served
        source = AdapterTensors(sent.config, sent.tensors)
        push = LoraSync.connect(source, served.engine, name, mode=served.update_mode())

        async def pushed() -> None:
            await push.push(version=sent.version or served.version_of(name))

        surplus: LoraSync | None = push
        try:
            await served.take_adapter(name, f"skyrl-memory://{name}", pushed)
            surplus, self._pushes[name] = self._pushes.get(name), push
        finally:
            if surplus is not None:
                await surplus.close()

    async def discard(self, name: str) -> bool:
        """Drop the tensors of an adapter; return whether there were any. It stays loaded if it is."""
        found = self._sent.pop(name, None) is not None
        if name not in self._served.adapters and (push := self._pushes.pop(name, None)) is not None:
            await push.close()
        return found

    async def close(self) -> None:
        """Drop all tensors, and end all pushes."""
        self.forget()
        self._sent.clear()
        while self._pushes:
            _, push = self._pushes.popitem()
            await push.close()


def _round(target: object) -> _Round:
    """Return the update that SkyRL's receive target announces."""
    if not isinstance(target, dict) or target.get("kind") != "lora" or not target.keys() <= _FIELDS:
        raise InvalidRequest(
            f"receive_target={shown(target)}: expected an object of kind 'lora' with lora_name, adapter_config and "
            "aliases",
            field="receive_target",
        )
    name, config, aliases = target.get("lora_name"), target.get("adapter_config"), target.get("aliases") or {}
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"lora_name={shown(name)}: expected a text that is not empty", field="lora_name")
    if not isinstance(config, dict):
        raise InvalidRequest(f"adapter_config={shown(config)}: expected an object", field="adapter_config")
    if not isinstance(aliases, dict) or not all(isinstance(sent, str) for sent in aliases.values()):
        raise InvalidRequest(f"aliases={shown(aliases)}: expected an object of names", field="aliases")
    fields: dict[str, JsonValue] = {"peft_type": "LORA", **cast("dict[str, JsonValue]", config)}
    return _Round(name, fields, aliases)
