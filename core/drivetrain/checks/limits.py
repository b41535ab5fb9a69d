"""Limits on requests and their inputs. A request beyond a limit is refused, naming it, before any work.

The limits are far above what training needs. Each exists because the input could otherwise use unbounded memory or
block a thread that other requests share.
"""

from __future__ import annotations

from typing import Final

MOST_SAMPLES: Final = 16_384
"""Maximum completions of one prompt (``n``)."""

MOST_SAMPLES_OF_A_CALL: Final = 1 << 20
"""Maximum completions of one call, over all its prompts."""

MOST_SESSIONS: Final = 1 << 16
"""Maximum sessions of an engine that are open at once."""

MOST_TURNS: Final = 1 << 16
"""Maximum turns of a session."""

MOST_MESSAGES: Final = 1 << 16
"""Maximum messages in a chat prompt."""

MOST_DECODED: Final = 1 << 24
"""Maximum token ids in one call to decode."""

PROMPT_THREADS: Final = 4
"""Number of threads per process that prepare prompts: chat messages, long texts, and many prompts at once."""

SAMPLES_UNDER_WAY: Final = 1 << 12
"""Maximum completions of one call that are in flight; the rest start as earlier ones end."""

SAMPLES_AT_ONCE: Final = 128
"""Maximum completions that are started, resumed, ended or cancelled before the event loop gets another turn."""

TOKENS_AT_ONCE: Final = 1 << 18
"""Maximum prompt tokens of completions that are started before the event loop gets another turn."""

STOP_SEARCH_S: Final = 0.05
"""Maximum CPU seconds for matching stop regexes after one token."""

MOST_STOPS: Final = 1024
"""Maximum stop strings of a request."""

MOST_STOP_REGEXES: Final = 64
"""Maximum stop regexes of a request."""

MOST_STOP_CHARACTERS: Final = 4096
"""Maximum characters of a stop string or stop regex."""

MOST_EXPRESSION_CHARACTERS: Final = 1 << 14
"""Maximum characters of all stop regexes of a request together, or of a grammar's regex."""

MOST_REPETITIONS: Final = 1 << 15
"""Maximum parts of an expression after its counts (``{3}``) are expanded, as the compiler does."""

MOST_STOP_TOKEN_IDS: Final = 1 << 16
"""Maximum stop token ids of a request."""

MOST_LISTED_TOKEN_IDS: Final = 1 << 20
"""Maximum token ids listed by a logit processor."""

MOST_SCORES: Final = 1 << 28
"""Maximum logprobs of given ids, or of the most likely ones, that are returned for one sequence."""
