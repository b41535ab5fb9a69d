"""Which requests have reached an engine: one that it does not know is either complete, or still on its way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Arrivals:
    """The engine's side: notes each request of the backend as it comes, in one bit."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def note(self, request_id: str) -> None:
        """It came. Ids that no backend gave are left out."""
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
        """How many tokens each of these has, of which ``live`` are not over; those that are complete are left out."""
        tokens: dict[str, int] = {}
        for request_id in request_ids:
            if request_id in live:
                tokens[request_id] = live[request_id]
            elif request_id not in self:
                tokens[request_id] = 0
        return tokens


def request_id(prefix: str, number: int) -> str:
    """Name a request for the engine; no such name is the beginning of another."""
    return f"{prefix}-{number}."


def _number_of(name: str) -> int | None:
    number = name.rpartition("-")[2].removesuffix(".")
    return int(number) if number.isdecimal() and name.endswith(".") else None
