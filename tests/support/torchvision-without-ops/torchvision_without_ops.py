"""Makes a torchvision built for CUDA importable beside a CPU build of torch.

Its compiled operators do not load there, and its import fails where it registers shapes for two of them. So the two are
declared before the import; they fail if called. Resizing and normalising images needs neither.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

_declared: list[Any] = []


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision" and not _declared:
            import torch

            if torch.version.cuda is None:
                operators = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
                for name in ("nms", "qnms"):
                    schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    operators.define(schema)  # type: ignore[no-untyped-call]
                _declared.append(operators)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
