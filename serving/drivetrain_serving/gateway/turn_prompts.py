"""The prompt of a turn: its ids, and the earlier turn that it extends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from drivetrain.text.chat_templates import render
from drivetrain.text.tokenizer import Tokenizer
from drivetrain.types.prompts import ChatPrompt, TextPrompt
from drivetrain_serving.gateway.continuation import CannotExtend, RenderedPrompt, ids_after, text_after, text_after_any
from drivetrain_serving.gateway.conversation_digests import Conversation, conversations
from drivetrain_serving.gateway.records import unpacked_ids
from drivetrain_serving.gateway.session_turns import Session, Turn, ids_of

FIRST: Final = "it is the first turn"
OTHER_MESSAGES: Final = "its messages continue those of no earlier turn of the model or adapter that it names"
NO_NEW_ANSWER: Final = "the request asks for no new answer, but continues a message"
_MOST_TRIED: Final = 8
"""Maximum number of earlier turns that a prompt is tried to extend; each costs up to three renderings."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as token ids, and its place in the session."""

    token_ids: list[int]
    path: Sequence[Turn]
    """The turns whose ids the prompt extends; empty if it was tokenised as a whole."""
    continues: int | None
    """The turn whose messages it continues."""
    begins_because: str | None
    """The reason why the prompt extends no turn; None if it does."""
    rendered: RenderedPrompt
    conversation: Conversation | None
    """Its messages; None if no later prompt can extend the answer, because the prompt does not open one."""

    @property
    def parent(self) -> Turn | None:
        """The turn whose ids the prompt extends."""
        return self.path[-1] if self.path else None

    @property
    def new_ids(self) -> list[int]:
        """The ids after the parent's."""
        return self.token_ids[self.parent.length :] if self.parent else self.token_ids

    @property
    def first_read(self) -> int:
        """The first id that no earlier turn's model has read: the parent's last, which was sampled at its end."""
        return max(self.parent.length - 1, 0) if self.parent else 0


def prepare(
    tokenizer: Tokenizer,
    session: Session,
    prompt: ChatPrompt,
    context_length: int,
    *,
    adapter: str | None,
    keep_answers: bool,
) -> PreparedPrompt:
    """Find the turn that a conversation continues, and return the prompt's ids. Call it in a thread.

    Args:
        tokenizer: The model's tokenizer.
        session: The session.
        prompt: The conversation, with messages in template form.
        context_length: The model's context length.
        adapter: The adapter that answers; None: the model itself.
        keep_answers: Extend an answer's ids also where the template renders it differently by now.

    Raises:
        InvalidRequest: The chat template rejects the messages, or the text is far too long.
    """
    text = render(tokenizer.inner, prompt)
    rendered = RenderedPrompt.of(text)
    continues: int | None = None
    because = OTHER_MESSAGES if session.turns else FIRST
    conversation: Conversation | None = None
    if not _opens_answer(prompt):
        because = NO_NEW_ANSWER
    else:
        known = conversations(prompt.messages, adapter)
        conversation = known[-1]
        for turn in islice(session.continued_by(known), _MOST_TRIED):
            sampled = unpacked_ids(turn.record.read().token_ids)
            try:
                after = _text_after(tokenizer, prompt, text, turn, sampled, keep_answers)
            except CannotExtend as error:
                if continues is None:
                    continues, because = turn.number, str(error)
                continue
            path = session.path_to(turn)
            ids = ids_of(path)
            ids += ids_after(tokenizer, after, ids[-1], context_length, "messages")
            continues = turn.number if continues is None else continues
            return PreparedPrompt(ids, path, continues, None, rendered, conversation)
    ids = tokenizer.encode(TextPrompt(text=text, add_special_tokens=False), context_length, "messages")
    return PreparedPrompt(ids, (), continues, because, rendered, conversation)


def _opens_answer(prompt: ChatPrompt) -> bool:
    """Return whether a prompt ends with the opening of a new answer; else no later prompt can extend what follows."""
    return prompt.add_generation_prompt and not prompt.continue_final_message


def _text_after(
    tokenizer: Tokenizer, prompt: ChatPrompt, text: str, turn: Turn, sampled: Sequence[int], keep_answers: bool
) -> str:
    try:
        return text_after(tokenizer, prompt, text, turn.rendered, turn.message_count, sampled)
    except CannotExtend:
        if not keep_answers:
            raise
    return text_after_any(tokenizer, prompt, turn.rendered, turn.message_count, sampled)
