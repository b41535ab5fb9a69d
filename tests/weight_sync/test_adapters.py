"""LoRA adapters are looked at before an engine is given them."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain import InvalidRequest
from drivetrain_weight_sync.adapters import check_adapter


def test_an_adapter_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        check_adapter(str(tmp_path), 8, {})
