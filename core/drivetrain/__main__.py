"""Entry point of ``python -m drivetrain``, the same as ``drivetrain``."""

from __future__ import annotations

from drivetrain.cli import main

if __name__ == "__main__":
    main()
