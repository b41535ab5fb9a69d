"""Values that SGLang would not honour are refused before anything is started."""

from __future__ import annotations

import pytest

from drivetrain.errors import InvalidConfig
from drivetrain.testing import tiny_model
from drivetrain.types.config import EngineConfig
from drivetrain_sglang.engine import SGLangBackend


def test_latent_attention_is_refused_for_attention_in_plain_torch() -> None:
    given: dict[str, object] = {"backend": "sglang", "model": str(tiny_model("deepseek_v3")), "device": "cpu"}
    with pytest.raises(InvalidConfig, match="deepseek_v3 has multi-head latent attention") as caught:
        SGLangBackend.validate(EngineConfig.model_validate(given))
    assert caught.value.field == "attention_backend"
    SGLangBackend.validate(EngineConfig.model_validate(given | {"attention_backend": "intel_amx"}))
    SGLangBackend.validate(EngineConfig.model_validate(given | {"device": "cuda"}))
