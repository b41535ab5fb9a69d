"""The turns of a session, in the order in which they ended, as a tree of conversations."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain.types.outputs import VersionSpan
from drivetrain_serving.gateway.continuation import RenderedPrompt
from drivetrain_serving.gateway.conversation_digests import Conversation
from drivetrain_serving.gateway.records import Record, SpillFile, StoredRecord, unpacked_ids


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt and the ids that were sampled for it."""

    number: int
    """Position among the session's turns."""
    parent: int | None
    """The turn whose ids the prompt extends; None if the prompt was tokenised as a whole."""
    continues: int | None
    """The turn whose messages the request continues; its ids could not be extended if ``parent`` is another."""
    begins_because: str | None
    """The reason why the prompt extends no turn; None if it does."""
    prompt_length: int
    """Number of prompt ids."""
    sampled_length: int
    """Number of sampled ids."""
    rendered: RenderedPrompt
    """The prompt's text."""
    message_count: int
    """Number of messages up to the answer, which is the last of them."""
    finish_reason: str
    """As in the answer; ``disconnect`` if the client had gone before the end."""
    weight_versions: tuple[VersionSpan, ...]
    """Weight versions of the sampled ids."""
    logprobs_mode: str | None
    """The distribution that the logprobs belong to."""
    model: str
    """Name of the model or adapter that the request named."""
    first_read: int
    """The prompt's first id that no earlier turn's model has read."""
    sampling_params: Mapping[str, float | int | None]
    """Fields of the request that shape the distribution of its ids."""
    ended: float
    """Unix time at which the turn ended."""
    record: StoredRecord

    @property
    def length(self) -> int:
        """Number of ids of the prompt and the answer."""
        return self.prompt_length + self.sampled_length


@dataclass(eq=False, slots=True)
class Session:
    """A session and its turns. Turns are only ever added."""

    id: str
    created: float = field(default_factory=time.time)
    last_used: float = field(default_factory=time.monotonic)
    in_flight: int = 0
    """Requests that generate or read the session."""
    turns_in_flight: int = 0
    """Turns that the requests in flight may still add."""
    turns: list[Turn] = field(default_factory=list)
    file: SpillFile = field(default_factory=SpillFile)
    _by_messages: dict[bytes, list[tuple[bytes, int]]] = field(default_factory=dict)
    """Digest of a conversation → exact digest and number of each turn that ends with it."""

    def add(self, turn: Turn, conversation: Conversation | None) -> None:
        """Add a turn.

        Args:
            turn: The turn.
            conversation: Its messages, its answer included, by which later requests find it; None if none can continue
                it.
        """
        self.turns.append(turn)
        if conversation is not None:
            self._by_messages.setdefault(conversation.digest, []).append((conversation.exact, turn.number))

    def continued_by(self, conversations: Sequence[Conversation]) -> Iterator[Turn]:
        """Yield the turns that a conversation continues.

        Turns with more messages come first, then turns whose answer came back unchanged, then later ones.
        """
        for digest, exact in reversed(conversations):
            turns = self._by_messages.get(digest, ())
            for _, number in sorted(turns, key=lambda one: (one[0] == exact, one[1]), reverse=True):
                yield self.turns[number]

    def path_to(self, turn: Turn) -> list[Turn]:
        """Return the turns whose ids ``turn`` extends, from the first to ``turn`` itself."""
        path = [turn]
        while path[-1].parent is not None:
            path.append(self.turns[path[-1].parent])
        return path[::-1]


def leaves_of(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns that no other turn extends."""
    parents = {turn.parent for turn in turns}
    return [turn for turn in turns if turn.number not in parents]


def ids_of(path: Sequence[Turn]) -> list[int]:
    """Return all ids of a path of turns. Call it in a thread: it may read from disk."""
    ids: list[int] = []
    for turn in path:
        record: Record = turn.record.read()
        ids.extend(unpacked_ids(record.new_prompt_ids))
        ids.extend(unpacked_ids(record.token_ids))
    return ids
