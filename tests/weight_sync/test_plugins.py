"""Transports of plugins are found by name on both sides, and refused with a reason if unusable."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weight_sync.hosted_engine import HostedEngine
from tests.weight_sync.models import Model, differing, tensors_of
from tests.weight_sync.receiver_engines import InlineEngine

from drivetrain.errors import InvalidRequest, UnsupportedCapability, WeightSyncError
from drivetrain.types.capability import Capability
from drivetrain_weight_sync import Strategy, WeightSync
from drivetrain_weight_sync.transports import find_transport, transport_names

PIGEON = """
from pathlib import Path
import torch
from drivetrain.types.weights import PluginSource
from drivetrain_weight_sync.transports import Opened, Reader, Sender, Transport

class PigeonSender(Sender):
    def __init__(self, loft): self.loft = loft
    def begin(self, plan): self.tensors = {}
    def put(self, name, tensor, *, held): self.tensors[name] = tensor.clone()
    def source(self):
        torch.save(self.tensors, self.loft / "letter")
        return PluginSource(transport="pigeon", data={"letter": str(self.loft / "letter")})
    def release(self): self.tensors = {}

class PigeonReader(Reader):
    def open(self, request, manifest):
        self.plan = request.plan
        self.letter = torch.load(request.source.data["letter"], weights_only=True)
        return Opened(request.plan, request.digests)
    def tensors(self, index):
        for placed in self.plan.buckets[index].tensors:
            yield placed.spec.name, self.letter[placed.spec.name]
    def release(self): self.letter = {}

class Pigeon(Transport):
    name = "pigeon"
    def sender(self): return PigeonSender(self.directory)
    @classmethod
    def reader(cls): return PigeonReader()

Deaf = type("Deaf", (Pigeon,), {"name": "parrot"})
not_a_class = 3
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs distributions with transports, for this process and its children."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "pigeon_plugin.py").write_text(PIGEON)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))

    def build(distribution: str = "pigeon_post", **transports: str) -> None:
        info = site / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in transports.items())
        (info / "entry_points.txt").write_text(f"[drivetrain.weight_transports]\n{lines}")

    return build


async def test_a_plugins_transport_reaches_another_process(install: Install, tmp_path: Path) -> None:
    install(pigeon="pigeon_plugin:Pigeon")
    trained = Model(1)
    async with HostedEngine(Model(2)) as engine:
        ready = find_transport("pigeon")(tmp_path)
        with pytest.raises(InvalidRequest, match="directory of its own"):
            WeightSync.connect(trained, engine, ready, directory=tmp_path)
        for how, directory in (("pigeon", tmp_path), (ready, None)):
            async with WeightSync.connect(trained, engine, how, directory=directory, bucket_bytes=8192) as sync:
                assert sync.strategy is Strategy.PLUGIN
                with torch.no_grad():
                    trained.model.norm.weight.add_(1)
                result = await sync.push(version="v")
                assert (result.strategy, result.sent_nbytes) == (Strategy.PLUGIN, result.nbytes)
            assert not differing(await engine.tensors(), tensors_of(trained))


async def test_what_a_plugins_transport_spoils_is_found(install: Install, tmp_path: Path) -> None:
    install(pigeon="pigeon_plugin:Pigeon")
    trained, served = Model(1), Model(2)
    engine = InlineEngine(served)
    async with WeightSync.connect(trained, engine, "pigeon", directory=tmp_path) as sync:
        handle = await sync.start_weight_transfer(version="v")
        await handle.wait()
        update: Any = engine.receiver.update
        receiver_tensors = update.reader.letter
        receiver_tensors["model.norm.weight"] += 1
        with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
            await handle.finish()
        await sync.push(version="v2")
    assert not differing(tensors_of(served), tensors_of(trained))


def test_what_is_not_there_is_refused_with_what_is() -> None:
    assert "delta" in transport_names()
    with pytest.raises(InvalidRequest, match=r"no weight transport 'owl' here; installed: .*delta"):
        find_transport("owl")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nowhere:Pigeon", "cannot be loaded: ModuleNotFoundError"),
        ("pigeon_plugin:not_a_class", "not a subclass of Transport"),
        ("pigeon_plugin:Deaf", "has the name 'parrot'"),
    ],
)
def test_a_plugin_that_is_wrong_is_named(install: Install, value: str, message: str) -> None:
    install(pigeon=value)
    with pytest.raises(WeightSyncError, match=message):
        WeightSync.connect({}, InlineEngine(Model(0)), "pigeon")


def test_two_plugins_of_one_name_are_both_named(install: Install) -> None:
    install("one_post", pigeon="pigeon_plugin:Pigeon")
    install("two_post", pigeon="pigeon_plugin:Pigeon")
    with pytest.raises(WeightSyncError, match="one_post and two_post both register"):
        find_transport("pigeon")


def test_an_engine_that_takes_none_is_not_asked() -> None:
    engine = InlineEngine(Model(0))
    engine.capabilities -= {Capability.WEIGHTS_PLUGIN}
    with pytest.raises(UnsupportedCapability) as caught:
        WeightSync.connect({}, engine, "delta")
    assert caught.value.capability == "weights_plugin"
