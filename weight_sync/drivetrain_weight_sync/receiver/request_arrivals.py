"""Record of the requests that reached an engine; it tells a finished request from one still on its way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Arrivals:
    """Records, in the engine's process, one bit for each request of the backend that arrived."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def note(self, request_id: str) -> None:
        """Record an arrival. Ids that no backend made are ignored."""
        number = _number_of(request_id)
        if number is None:
            return
        if number // 8 >= len(self._bits):
            self._bits.extend(bytes(max(number // 8 + 1 - len(self._bits), len(self._bits))))
        self._bits[number // 8] |= 1 << number % 8

    def __contains__(self, request_id: str) -> bool:
        number = _number_of(request_id)
        return number is not None and number // 8 < len(self._bits) and bool(self._bits[number // 8] >> number % 8 & 1)

    def tokens(self, request_ids: Iterable[str], live: Mapping[str, int]) -> dict[str, int]:
        """Return token counts of unfinished requests: from ``live`` if running, 0 if the request has not arrived."""
        tokens: dict[str, int] = {}
        for request_id in request_ids:
            if request_id in live:
                tokens[request_id] = live[request_id]
            elif request_id not in self:
                tokens[request_id] = 0
        return tokens


def request_id(prefix: str, number: int) -> str:
    """Return a request's id for the engine; no such id is a prefix of another."""
    return f"{prefix}-{number}."


def _number_of(name: str) -> int | None:
    number = name.rpartition("-")[2].removesuffix(".")
    return int(number) if number.isdecimal() and name.endswith(".") else None
