"""Bounds of what a request, or an input of one, may ask for. Each is refused by name, before any work.

They lie far above what training needs. A bound stands here where an input would otherwise take memory without end, or
block a thread that other requests share.
"""

from __future__ import annotations

from typing import Final

MOST_SAMPLES: Final = 16_384
"""Most completions of one prompt (``n``)."""

MOST_SAMPLES_OF_A_CALL: Final = 1 << 20
"""Most completions of one call, all its prompts together."""

MOST_MESSAGES: Final = 1 << 16
"""Most messages of a chat prompt."""

MOST_DECODED: Final = 1 << 24
"""Most token ids that are decoded at once."""

PROMPT_THREADS: Final = 4
"""Threads in which a process reads prompts: chat messages, long texts, and many prompts at once."""

SAMPLES_UNDER_WAY: Final = 1 << 12
"""Most completions of one call that the engine has at a time; more of them are made as earlier ones end."""

SAMPLES_AT_ONCE: Final = 128
"""Most completions that are started, let go on, ended or cancelled before the event loop gets another turn."""

TOKENS_AT_ONCE: Final = 1 << 18
"""Most prompt tokens of completions that are started before the event loop gets another turn."""

STOP_SEARCH_S: Final = 0.05
"""Most CPU seconds that looking for a stop regex may take after one token."""

MOST_STOPS: Final = 1024
"""Most stop strings of a request."""

MOST_STOP_REGEXES: Final = 64
"""Most stop regexes of a request."""

MOST_STOP_CHARACTERS: Final = 4096
"""Most characters of a stop string or a stop regex."""

MOST_EXPRESSION_CHARACTERS: Final = 1 << 14
"""Most characters of all stop regexes of a request together, or of a regex that is a grammar."""

MOST_REPETITIONS: Final = 1 << 15
"""Most parts of an expression, its counts (``{3}``) written out, which is how they are compiled."""

MOST_STOP_TOKEN_IDS: Final = 1 << 16
"""Most stop token ids of a request."""

MOST_LISTED_TOKEN_IDS: Final = 1 << 20
"""Most token ids that a logit processor lists."""
