from __future__ import annotations

import sys
from pathlib import Path

# The receiver's host process is a script beside the tests; tests import it by its full name.
sys.path.insert(0, str(Path(__file__).parents[2]))
