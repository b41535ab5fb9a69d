"""Names of a package that are imported on first use."""

from __future__ import annotations

import ast


def names_of_stub(init: str) -> dict[str, str]:
    """Read the names that a package exports from the imports of its stub, ``__init__.pyi``.

    Args:
        init: Path of the package's ``__init__.py``; the stub lies beside it.

    Returns:
        Each name, with the module that defines it.
    """
    with open(f"{init}i", encoding="utf-8") as stub:
        imports = [node for node in ast.parse(stub.read()).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names if node.module is not None}
