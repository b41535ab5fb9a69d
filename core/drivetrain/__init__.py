"""One interface between an RL trainer and any LLM inference engine.

Names are imported on first use, so ``import drivetrain`` is cheap. ``__init__.pyi`` lists them, also for type checkers.
"""

from __future__ import annotations

import importlib

from drivetrain.lazy_imports import names_of_stub

_MODULE_OF = names_of_stub(__file__)
__all__ = [*_MODULE_OF, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("drivetrain")
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
