"""The same requests to two servers, and a comparison of what they answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import httpx

Answers = Mapping[str, tuple[int, object]]
"""Name of a request → the status and body of its answer."""


@dataclass(frozen=True)
class Asked:
    """A request, and what of their answer ours may lack."""

    name: str
    method: str
    path: str
    body: Mapping[str, object] | None = None
    lacks: tuple[str, ...] = ()
    """Paths of fields that only they write, with the fields inside; the reason is in a comment."""
    headers: Mapping[str, str] = field(default_factory=dict)


def answers(url: str, requests: Iterable[Asked]) -> dict[str, tuple[int, object]]:
    """Return the status and body of each request; a stream is the list of its events."""
    found: dict[str, tuple[int, object]] = {}
    for asked in requests:
        data = None if asked.body is None else json.dumps(asked.body)
        kinds = {"content-type": "application/json"} if data else {}
        content = data or ("{" if asked.headers else None)
        headers = {**kinds, **asked.headers}
        response = httpx.request(asked.method, url + asked.path, content=content, headers=headers, timeout=120)
        found[asked.name] = response.status_code, _read(response)
    return found


def _read(response: httpx.Response) -> object:
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        return [event if event == "[DONE]" else json.loads(event) for event in events]
    try:
        return response.json()
    except ValueError:
        return response.text


def shape(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and type of each field; of a list, all entries count as one."""
    match value:
        case Mapping():
            by_token = path.endswith(("logprobs.top_logprobs.[]", "prompt_logprobs.[]"))
            for key, one in value.items():
                name = "TOKEN" if by_token else str(key)
                yield from shape(one, f"{path}.{name}" if path else name)
        case list():
            yield path, "list"
            for one in value:
                yield from shape(one, f"{path}.[]" if path else "[]")
        case _:
            yield (
                path,
                "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__,
            )


def compare(asked: Asked, of_theirs: Answers, of_ours: Answers) -> None:
    """Fail unless ours has the status of theirs, and every field, of the same type where neither is null."""
    (their_status, theirs), (our_status, ours) = of_theirs[asked.name], of_ours[asked.name]
    assert our_status == their_status, (theirs, ours)
    their_shape, our_shape = dict.fromkeys(shape(theirs)), dict.fromkeys(shape(ours))
    our_types: dict[str, set[str]] = {}
    for path, kind in our_shape:
        our_types.setdefault(path, set()).add(kind)
    absent = sorted(
        path
        for path in {path for path, _ in their_shape} - our_types.keys()
        if not any(path == one or path.startswith(f"{one}.") for one in asked.lacks)
        and not any(one.startswith(f"{path}.") for one in our_types)  # theirs is null, ours an object
    )
    assert not absent, f"ours lacks {absent}"
    differ = sorted(
        f"{path}: {kind}, ours {sorted(our_types[path])}"
        for path, kind in their_shape
        if path in our_types and kind not in our_types[path] and kind != "NoneType" and our_types[path] != {"NoneType"}
    )
    assert not differ
