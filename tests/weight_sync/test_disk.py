"""A checkpoint folder in any format describes itself, and is checked before anything changes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.weight_sync.models import Model, differing, tensors_of

from drivetrain.errors import DrivetrainError, InvalidRequest, InvalidWeights, WeightPlanMismatch, WeightSyncError
from drivetrain.types.weights import (
    BeginUpdate,
    CommitUpdate,
    DiskSource,
    LoadBuckets,
    PrepareUpdate,
    VerifyUpdate,
    WeightUpdateRequest,
)
from drivetrain_weight_sync import ModuleTarget, Receiver
from drivetrain_weight_sync.copying.digest import digests

Tensors = dict[str, torch.Tensor]


def one_safetensors(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors")


def sharded(folder: Path, tensors: Tensors) -> None:
    names = list(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    save_file({"stale": torch.zeros(1)}, folder / "old.safetensors")
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def one_bin(folder: Path, tensors: Tensors) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")
    torch.save({"lr": 1}, folder / "training_args.bin")


def two_bins(folder: Path, tensors: Tensors) -> None:
    names = list(tensors)
    torch.save({f"module.{name}": tensors[name] for name in names[::2]}, folder / "part-1.bin")
    torch.save({f"module.{name}": tensors[name] for name in names[1::2]}, folder / "part-2.bin")


FORMATS: list[Callable[[Path, Tensors], None]] = [one_safetensors, sharded, one_bin, two_bins]


def request(folder: Path, digests: dict[str, int] | None = None) -> WeightUpdateRequest:
    return WeightUpdateRequest(version="v", source=DiskSource(path=str(folder)), digests=digests)


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("absent", ["", "lm_head.weight", "model.embed.weight"])
def test_every_format_arrives_bitwise(write: Callable[[Path, Tensors], None], absent: str, tmp_path: Path) -> None:
    trained, served = Model(1), Model(2)
    write(tmp_path, {name: tensor for name, tensor in tensors_of(trained).items() if name != absent})
    receiver = Receiver(ModuleTarget(served))
    buckets = receiver.handle(PrepareUpdate(request(tmp_path))).buckets
    receiver.handle(BeginUpdate())
    nbytes = receiver.handle(LoadBuckets(tuple(range(buckets)))).nbytes
    assert nbytes == sum(t.nbytes for n, t in tensors_of(trained).items() if n != "lm_head.weight")
    receiver.handle(VerifyUpdate())
    receiver.handle(CommitUpdate("v"))
    assert not differing(tensors_of(served), tensors_of(trained))


def changed(name: str, tensor: torch.Tensor | None) -> Tensors:
    tensors = tensors_of(Model(1))
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    return tensors


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (changed(NORM, None), WeightPlanMismatch, r"Missing: model\.norm\.weight"),
        (changed("more", torch.zeros(1)), WeightPlanMismatch, "Extra: more"),
        (changed(NORM, torch.zeros(23)), WeightPlanMismatch, r"got float32 \[23\], expected float32 \[24\]"),
        (
            changed(NORM, torch.zeros(24).double()),
            WeightPlanMismatch,
            r"float64, which would round to .*float32 \(model\.norm",
        ),
        (changed(NORM, torch.full((24,), float("nan"))), InvalidWeights, r"model\.norm\.weight \(NaN\)"),
        (changed("lm_head.weight", torch.zeros(61, 24).bfloat16()), WeightPlanMismatch, "differ in"),
    ],
)
def test_a_bad_checkpoint_is_refused_before_anything_changes(
    tensors: Tensors, error: type[DrivetrainError], message: str, tmp_path: Path
) -> None:
    one_safetensors(tmp_path, tensors)
    served = Model(2)
    before = tensors_of(served)
    with pytest.raises(error, match=message):
        Receiver(ModuleTarget(served)).handle(PrepareUpdate(request(tmp_path)))
    assert not differing(tensors_of(served), before)


def test_a_checkpoint_of_a_narrower_float_type_is_taken(tmp_path: Path) -> None:
    trained, served = tensors_of(Model(1)), Model(2)
    trained[NORM] = trained[NORM].bfloat16()
    one_safetensors(tmp_path, trained)
    receiver = Receiver(ModuleTarget(served))
    buckets = receiver.handle(PrepareUpdate(request(tmp_path))).buckets
    for message in (BeginUpdate(), LoadBuckets(tuple(range(buckets))), VerifyUpdate(), CommitUpdate("v")):
        receiver.handle(message)
    assert not differing(tensors_of(served), {**trained, NORM: trained[NORM].float()})


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), r"neither \*.safetensors nor \*.bin"),
        (truncate, r"model\.safetensors that cannot be read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "cannot be read"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "index .* cannot be read"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": 5}}'),
            "index .* cannot be read",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "gone.bin"}}'),
            r"lacks gone\.bin",
        ),
        (lambda folder: one_safetensors(folder, {"module.w": torch.ones(1), "w": torch.ones(1)}), "holds w twice"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused(
    spoil: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    one_safetensors(tmp_path, tensors_of(Model(1)))
    spoil(tmp_path)
    with pytest.raises(InvalidRequest, match=message) as caught:
        Receiver(ModuleTarget(Model(2))).handle(PrepareUpdate(request(tmp_path)))
    assert caught.value.field == "source.path"


@pytest.mark.parametrize(("name", "message"), [("gone", "does not exist"), ("file", "is not a folder")])
def test_a_missing_folder_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=message) as caught:
        Receiver(ModuleTarget(Model(2))).handle(PrepareUpdate(request(tmp_path / name)))
    assert str(tmp_path / name) in str(caught.value)


def test_a_bin_file_cannot_run_code(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return Path.touch.__get__(tmp_path / "ran"), ()  # type: ignore[return-value]

    torch.save({"w": Attack()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        Receiver(ModuleTarget(Model(2))).handle(PrepareUpdate(request(tmp_path)))
    assert not (tmp_path / "ran").exists()


def test_files_that_are_not_what_the_sender_digested_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of(Model(1))
    one_safetensors(tmp_path, tensors)
    expected = digests(tensors)
    receiver = Receiver(ModuleTarget(Model(2)))
    receiver.handle(PrepareUpdate(request(tmp_path, digests=expected)))
    tensors[NORM][3] += 1
    one_safetensors(tmp_path, tensors)
    with pytest.raises(WeightSyncError, match=r"differ: model\.norm\.weight"):
        receiver.handle(PrepareUpdate(request(tmp_path, digests=expected)))


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_an_index_that_names_files_outside_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    one_safetensors(tmp_path, tensors_of(Model(1)))
    index = {"metadata": {}, "weight_map": {NORM: name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidRequest, match="names files outside it"):
        Receiver(ModuleTarget(Model(2))).handle(PrepareUpdate(request(folder)))


def test_a_fifo_is_refused_and_freezes_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match="not a regular file"):
        Receiver(ModuleTarget(Model(2))).handle(PrepareUpdate(request(tmp_path)))
