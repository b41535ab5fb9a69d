"""A save writes the target's tensors completely or not at all, and blocks nobody."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from tests.weight_sync.models import Model, differing, tensors_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from drivetrain.backend.toolkit.owned_folder import OwnedFolder, remove_orphans
from drivetrain.errors import EngineBusy, EngineInternalError, EngineStateError, InvalidRequest, UnsupportedCapability
from drivetrain.testing import tiny_model
from drivetrain.types.weights import TensorSpec, WeightManifest
from drivetrain_weight_sync import ModelFiles, ModuleTarget, TracedTarget, WeightWriter, save_remote, save_sharded
from drivetrain_weight_sync.receiver.saving import INDEX

WITHIN_S = 20.0


def files(model: Path | None = None, dtype: str = "float32") -> ModelFiles:
    return ModelFiles(str(model or tiny_model("qwen2")), None, dtype)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def write(writer: WeightWriter, folder: Path) -> None:
    writer.write(folder)


async def save(writer: WeightWriter, folder: Path, beside: ModelFiles | None = None) -> None:
    async with asyncio.timeout(WITHIN_S):
        await save_sharded(str(folder), beside or files(), lambda staged: write(writer, staged))


async def save_to(url: str, writer: WeightWriter) -> None:
    async with asyncio.timeout(WITHIN_S):
        await save_remote(url, files(), lambda staged: write(writer, staged))


async def until_written(writer: WeightWriter, folder: Path) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                writer.write(folder)
            except EngineBusy:
                await asyncio.sleep(0.01)
            else:
                return


class Halting(ModuleTarget):
    """Stops while reading its second tensor until told to continue."""

    def __init__(self) -> None:
        super().__init__(Model(1))
        self.reads = 0
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def read(self, name: str) -> torch.Tensor:
        self.reads += 1
        if self.reads == 2:
            self.reached.set()
            assert self.go_on.wait(WITHIN_S)
        return super().read(name)


@pytest.fixture
def halting() -> Iterator[Halting]:
    target = Halting()
    yield target
    target.go_on.set()


# Contents ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [10**9, 4000, 1])
async def test_every_tensor_is_written_once_and_the_index_names_its_file(tmp_path: Path, shard_bytes: int) -> None:
    model = Model(1)
    await save(WeightWriter(ModuleTarget(model), shard_bytes), tmp_path / "saved")
    expected = tensors_of(model)
    del expected["lm_head.weight"]  # tied
    assert differing(saved(tmp_path / "saved"), expected) == []
    index = json.loads((tmp_path / "saved" / INDEX).read_text())
    shards = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert index["weight_map"] == {name: shard.name for shard in shards for name in load_file(shard)}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    for shard in shards:
        tensors = load_file(shard).values()
        assert sum(tensor.nbytes for tensor in tensors) <= shard_bytes or len(tensors) == 1
    assert (len(shards) > 1) is (shard_bytes < 10**9)
    assert names(tmp_path) == ["saved"]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
async def test_what_is_saved_is_a_model_that_transformers_loads(tmp_path: Path, architecture: str) -> None:
    folder = tiny_model(architecture)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    await save(WeightWriter(ModuleTarget(model), 10_000), tmp_path / "saved", files(folder))
    loading: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    loaded, report = loading
    assert not any(report.values()), report
    assert differing(tensors_of(loaded), tensors_of(model)) == []
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("x y") == AutoTokenizer.from_pretrained(folder)("x y")
    weights = {path.name for path in folder.iterdir() if "safetensors" in path.name}
    beside = {path.name for path in (tmp_path / "saved").iterdir() if "safetensors" not in path.name}
    assert beside == {path.name for path in folder.iterdir()} - weights


async def test_what_an_engine_fused_is_written_apart(tmp_path: Path) -> None:
    fused = torch.zeros(6, 3)

    def load_weights(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            fused[{"a": slice(0, 4), "b": slice(4, 6)}[name]].copy_(tensor)

    manifest = WeightManifest((TensorSpec("a", "float32", (4, 3)), TensorSpec("b", "float32", (2, 3))), {})
    target = TracedTarget(load_weights, manifest)  # type: ignore[arg-type]
    fused.copy_(torch.arange(18).view(6, 3))
    await save(WeightWriter(target), tmp_path / "saved")
    assert differing(saved(tmp_path / "saved"), {"a": fused[:4], "b": fused[4:]}) == []


async def test_the_configuration_names_the_dtype_that_is_served(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()

    def config(dtype: str) -> dict[str, object]:
        return {"dtype": dtype, "text_config": {"torch_dtype": dtype, "hidden_size": 8}, "name": "float32"}

    (model / "config.json").write_text(json.dumps(config("float32")))
    (model / "optimizer.pt").write_text("of a trainer")
    (model / "model.safetensors.index.json").write_text("of other shards")
    (model / "checkpoint-1").mkdir()
    await save(WeightWriter(ModuleTarget(Model(1))), tmp_path / "saved", files(model, "bfloat16"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config("bfloat16")
    assert names(tmp_path / "saved") == ["config.json", "model.safetensors", INDEX]


# All or nothing ------------------------------------------------------------------------------------------------------


async def test_nothing_is_there_until_all_is_and_nothing_after_it_was_cancelled(
    tmp_path: Path, halting: Halting
) -> None:
    writer, place = WeightWriter(halting), tmp_path / "deep" / "saved"
    saving = asyncio.create_task(save(writer, place))
    assert await asyncio.to_thread(halting.reached.wait, WITHIN_S)
    assert not place.exists()
    saving.cancel()
    await asyncio.wait([saving], timeout=WITHIN_S)
    assert saving.cancelled()
    assert names(place.parent) == []
    halting.go_on.set()
    await save(writer, place)
    assert names(place.parent) == ["saved"]
    assert len(saved(place)) == len(halting.manifest().tensors)


async def test_a_save_that_is_cancelled_as_its_folder_appears_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, place, rename = WeightWriter(ModuleTarget(Model(1))), tmp_path / "saved", Path.rename
    reached, go_on = threading.Event(), threading.Event()

    def slow(self: Path, target: Path) -> Path:
        if target == place:
            reached.set()
            assert go_on.wait(WITHIN_S)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", slow)
    saving = asyncio.create_task(save(writer, place))
    assert await asyncio.to_thread(reached.wait, WITHIN_S)
    saving.cancel()
    asyncio.get_running_loop().call_soon(go_on.set)
    await asyncio.wait([saving], timeout=WITHIN_S)
    assert saving.cancelled()
    assert names(tmp_path) == []


async def test_a_folder_that_is_filled_meanwhile_is_left_as_it_is(tmp_path: Path, halting: Halting) -> None:
    place = tmp_path / "saved"
    saving = asyncio.create_task(save(WeightWriter(halting), place))
    assert await asyncio.to_thread(halting.reached.wait, WITHIN_S)
    place.mkdir()
    (place / "note").write_text("of somebody else")
    halting.go_on.set()
    with pytest.raises(EngineInternalError, match="not empty"):
        await saving
    assert names(place) == ["note"]
    assert names(tmp_path) == ["saved"]


async def test_files_that_cannot_be_removed_do_not_change_how_a_save_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(folder: Path) -> None:
        raise OSError("the folder is in use")

    monkeypatch.setattr("drivetrain_weight_sync.receiver.saving._discard", busy)
    with pytest.raises(EngineInternalError, match=r"config\.json") as caught:
        await save(WeightWriter(ModuleTarget(Model(1))), tmp_path / "saved", files(tmp_path))
    assert "the folder is in use" in caught.value.__notes__[0]


async def test_a_model_whose_files_are_gone_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(EngineInternalError, match=r"config\.json"):
        await save(WeightWriter(ModuleTarget(Model(1))), tmp_path / "saved", files(tmp_path))
    assert names(tmp_path) == []


async def test_weights_that_sleep_are_not_written(tmp_path: Path) -> None:
    model = Model(1)
    model.model.norm.weight.untyped_storage().resize_(0)
    with pytest.raises(EngineStateError, match=r"norm\.weight"):
        await save(WeightWriter(ModuleTarget(model)), tmp_path / "saved")
    assert names(tmp_path) == []


async def test_no_tensor_is_looked_at_once_it_was_stopped(tmp_path: Path, halting: Halting) -> None:
    writer = WeightWriter(halting)
    saving = asyncio.create_task(save(writer, tmp_path / "saved"))
    assert await asyncio.to_thread(halting.reached.wait, WITHIN_S)
    stopping = asyncio.create_task(asyncio.to_thread(writer.stop))
    await asyncio.sleep(0.1)
    assert not stopping.done(), "it did not wait until the tensor that was looked at had been copied"
    halting.go_on.set()
    await asyncio.wait_for(stopping, WITHIN_S)
    with pytest.raises(EngineInternalError, match="about to change"):
        await saving
    assert halting.reads == 2
    assert names(tmp_path) == []
    await save(writer, tmp_path / "saved")
    assert len(saved(tmp_path / "saved")) == len(halting.manifest().tensors)


async def test_a_write_that_nobody_waits_for_any_more_makes_room(tmp_path: Path, halting: Halting) -> None:
    writer, first, second = WeightWriter(halting), tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    for folder in (first, first, second):
        with pytest.raises(EngineBusy, match="first"):
            writer.write(folder)
    halting.go_on.set()
    await until_written(writer, second)
    assert differing(saved(first), saved(second)) == []


# URLs ----------------------------------------------------------------------------------------------------------------


class Failing(MemoryFileSystem):  # type: ignore[misc]
    """Accepts the weights, and fails at the last file."""

    protocol = "failing"
    store: dict[str, object] = {}  # noqa: RUF012 - as in its base class
    names: list[str] = []  # noqa: RUF012

    def put_file(self, *paths: Any, **more: Any) -> None:
        self.names.append(paths[1].rpartition("/")[2])
        if self.names[-1] == "config.json":
            raise PermissionError("the bucket is full")
        super().put_file(*paths, **more)


async def test_a_url_gets_the_same_files_as_a_folder(tmp_path: Path) -> None:
    writer = WeightWriter(ModuleTarget(Model(1)), 4000)
    await save(writer, tmp_path / "saved")
    await save_to("memory://bucket/saved", writer)
    there = fsspec.filesystem("memory")
    assert {name.rpartition("/")[2] for name in there.ls("/bucket/saved", detail=False)} == {
        path.name for path in (tmp_path / "saved").iterdir()
    }
    for path in (tmp_path / "saved").iterdir():
        assert there.cat(f"/bucket/saved/{path.name}") == path.read_bytes()
    with pytest.raises(InvalidRequest, match="not empty"):
        await save_to("memory://bucket/saved", writer)
    there.rm("/bucket", recursive=True)


async def test_the_configuration_goes_last_and_what_failed_is_taken_away() -> None:
    fsspec.register_implementation("failing", Failing, clobber=True)
    with pytest.raises(EngineInternalError, match="the bucket is full"):
        await save_to("failing://bucket/saved", WeightWriter(ModuleTarget(Model(1))))
    assert Failing.names[-1] == "config.json"
    assert {"model.safetensors", INDEX} <= set(Failing.names)
    assert not Failing().find("/bucket")


@pytest.mark.parametrize("protocol", ["memory", "failing"])
async def test_a_staged_model_that_cannot_be_removed_does_not_change_how_a_save_ends(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stays(self: OwnedFolder) -> None:
        raise OSError("the folder is in use")

    fsspec.register_implementation("failing", Failing, clobber=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failing = pytest.raises(EngineInternalError, match="the bucket is full") if protocol == "failing" else nullcontext()
    with monkeypatch.context() as in_use:
        in_use.setattr(OwnedFolder, "remove", stays)
        with failing:
            await save_to(f"{protocol}://bucket/staged", WeightWriter(ModuleTarget(Model(1))))
    assert "the staged model of a save stays: the folder is in use" in caplog.text
    if protocol == "memory":
        assert "/bucket/staged/config.json" in MemoryFileSystem().find("/bucket/staged")
        MemoryFileSystem().rm("/bucket/staged", recursive=True)
    assert any(name.startswith("drivetrain-saving-") for name in names(tmp_path))
    remove_orphans(tmp_path, "drivetrain-saving-")
    assert not any(name.startswith("drivetrain-saving-") for name in names(tmp_path))


@pytest.mark.parametrize("uploaded", [False, True], ids=["before the last file", "after the last file"])
async def test_a_save_to_a_url_that_is_cancelled_late_leaves_nothing(
    uploaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, reached, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    class Slow(MemoryFileSystem):  # type: ignore[misc]
        protocol = "slow"
        store: dict[str, object] = {}  # noqa: RUF012 - as in its base class

        def put_file(self, *paths: Any, **more: Any) -> None:
            if paths[1].endswith("config.json"):
                loop.call_soon_threadsafe(reached.set)
                assert go_on.wait(WITHIN_S)
            super().put_file(*paths, **more)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fsspec.register_implementation("slow", Slow, clobber=True)
    with ThreadPoolExecutor(max_workers=1) as executor:
        monkeypatch.setattr(loop, "_default_executor", executor)
        saving = asyncio.create_task(save_to("slow://bucket/saved", WeightWriter(ModuleTarget(Model(1)))))
        await asyncio.wait_for(reached.wait(), WITHIN_S)
        if uploaded:  # the loop learns of it only after it has cancelled
            go_on.set()
            executor.submit(lambda: None).result()
        saving.cancel()
        loop.call_soon(go_on.set)
        await asyncio.wait([saving], timeout=WITHIN_S)
        executor.submit(lambda: None).result()
    assert saving.cancelled()
    assert not Slow().find("/bucket")
    assert not any(name.startswith("drivetrain-saving-") for name in names(tmp_path))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("telegraph://bucket", "telegraph"),
        ("absent://bucket", "install the package that brings it"),
        ("file://saved", "file:///"),
    ],
)
async def test_a_url_that_leads_nowhere_is_refused_before_any_work(url: str, says: str, halting: Halting) -> None:
    fsspec.register_implementation(
        "absent", "no_such_package.Files", errtxt="install the package that brings it", clobber=True
    )
    with pytest.raises(InvalidRequest, match=says) as caught:
        await save_to(url, WeightWriter(halting))
    assert caught.value.field == "url"
    assert halting.reads == 0


async def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, halting: Halting) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UnsupportedCapability, match=r"drivetrain\[remote\]") as caught:
        await save_to("memory://bucket/saved", WeightWriter(halting))
    assert caught.value.capability == "save_remote"
    assert halting.reads == 0
