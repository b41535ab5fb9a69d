"""A damaged checkpoint starts no engine and updates none, and what the engine serves stays whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drivetrain import create_engine
from drivetrain.errors import EngineStartError, InvalidRequest, InvalidWeights, WeightPlanMismatch, WeightSyncError

TENSOR = "model.layers.0.mlp.down_proj.weight"
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def truncate(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-1000])


def cut_the_header(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:20])


def name_a_missing_file(folder: Path) -> None:
    weight_map = {**dict.fromkeys(load_file(folder / FILE), FILE), TENSOR: "gone.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / FILE).rename(folder / "model-1.safetensors")


def cut_the_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")
    (folder / FILE).rename(folder / "model-1.safetensors")


def narrow_a_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({TENSOR: tensors[TENSOR][:, :-1].contiguous()}))


def drop_a_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(TENSOR))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


DAMAGES: dict[Callable[[Path], None], tuple[type[WeightSyncError] | type[InvalidRequest], str]] = {
    truncate: (InvalidRequest, FILE),
    cut_the_header: (InvalidRequest, FILE),
    name_a_missing_file: (InvalidRequest, "gone.safetensors"),
    cut_the_index: (InvalidRequest, INDEX),
    narrow_a_tensor: (WeightPlanMismatch, TENSOR),
    drop_a_tensor: (WeightPlanMismatch, TENSOR),
}
"""Each damage, with the error that refuses an update by it, and a part of the message."""


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "damaged"))


@pytest.mark.parametrize("damage", DAMAGES)
async def test_no_engine_starts_from_it(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    engine = create_engine("transformers", model=str(folder))
    with pytest.raises(EngineStartError, match=str(folder)):
        await engine.start()


async def test_no_update_by_it_is_taken(model: Path, folder: Path) -> None:
    async with create_engine("transformers", model=str(model)) as engine:
        version = engine.get_weight_version()
        before = (await engine.generate([5, 6, 7], {"max_new_tokens": 4, "temperature": 0})).completions[0]
        for damage, (error, naming) in DAMAGES.items():
            shutil.rmtree(folder)
            shutil.copytree(model, folder)
            damage(folder)
            with pytest.raises(error, match=naming):
                await engine.load_weights_from_disk(str(folder), "damaged")
            assert (engine.state.value, engine.get_weight_version()) == ("ready", version)
        report = await engine.validate_weights()
        assert report.ok
        assert TENSOR not in report.all_zero
        after = (await engine.generate([5, 6, 7], {"max_new_tokens": 4, "temperature": 0})).completions[0]
        assert after.token_ids == before.token_ids


@pytest.mark.parametrize(("value", "found"), [(float("nan"), "nan"), (float("inf"), "infinite")])
async def test_values_that_are_not_finite_are_reported(model: Path, folder: Path, value: float, found: str) -> None:
    rewrite(folder, lambda tensors: tensors[TENSOR][0, 0].fill_(value))
    async with create_engine("transformers", model=str(folder)) as engine:
        report = await engine.validate_weights()
        assert not report.ok
        assert getattr(report, found) == (TENSOR,)
        assert report.checked == len((await engine.weight_manifest()).tensors)
    async with create_engine("transformers", model=str(model)) as engine:
        with pytest.raises(InvalidWeights, match=TENSOR):
            await engine.load_weights_from_disk(str(folder), "damaged")
        assert (await engine.validate_weights()).ok
