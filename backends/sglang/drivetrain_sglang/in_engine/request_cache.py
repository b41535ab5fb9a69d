# pyright: reportMissingImports=false
"""SGLang's numbers about a request's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def of_request(req: Req, name: str) -> int:
    """Return a number: an attribute of the request or of its ``kv``, depending on the release."""
    holder: Any = req if hasattr(req, name) else req.kv
    return int(getattr(holder, name))
