"""Compare the folder that an engine saved with the model that it serves."""

from __future__ import annotations

import json
from pathlib import Path

from drivetrain.engine.engine import InferenceEngine
from drivetrain_conformance.assets.weight_sources import raw_bytes, tensors_of


async def check_saved(engine: InferenceEngine, folder: Path, model: Path) -> None:
    """Raise unless ``folder`` is a whole model: with each tensor that the engine names, once, as in ``model``."""
    lacking = _beside_the_weights(model) - _beside_the_weights(folder)
    assert not lacking, f"{', '.join(sorted(lacking))} of the model's folder was not saved"
    manifest, saved, expected = await engine.weight_manifest(), tensors_of(folder), tensors_of(model)
    stored = [manifest.aliases.get(name, name) for name in saved]
    served = {spec.name for spec in manifest.tensors}
    assert sorted(stored) == sorted(served), f"saved under other names than the model's: {sorted(served ^ set(stored))}"
    dtypes = {spec.name: spec.dtype for spec in manifest.tensors}
    for name, tensor in saved.items():
        assert str(tensor.dtype) == f"torch.{dtypes[manifest.aliases.get(name, name)]}", f"{name} is {tensor.dtype}"
        own = expected[name].to(tensor.dtype)
        assert raw_bytes(tensor) == raw_bytes(own), f"what was saved as {name} is not what was served"
    assert json.loads((folder / "config.json").read_text())["dtype"] == engine.model_info.dtype


def _beside_the_weights(folder: Path) -> set[str]:
    """Return the names of the files that configure a model and its tokenizer."""
    kinds = (".json", ".jinja", ".txt", ".model")
    return {file.name for file in folder.iterdir() if file.suffix in kinds and not file.name.endswith(".index.json")}
