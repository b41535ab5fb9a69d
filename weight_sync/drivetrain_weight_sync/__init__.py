"""Weight sync from a trainer to an engine: plans, transports, digests, and both ends of an update.

Names are imported on first use, so that a server can take a trainer's weights without torch in its own process.
``__init__.pyi`` lists them, also for type checkers.
"""

from __future__ import annotations

import importlib

from drivetrain.checks.extras import from_extra
from drivetrain.lazy_imports import names_of_stub

_MODULE_OF = names_of_stub(__file__)
__all__ = [*_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'drivetrain_weight_sync' has no attribute {name!r}")
    with from_extra("weight-sync", "weight sync"):
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
