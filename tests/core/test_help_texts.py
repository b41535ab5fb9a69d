"""A command's help keeps its paragraphs and lists, and no other line breaks."""

from __future__ import annotations

from drivetrain.cli.help_texts import help_of


def command() -> None:
    """Do it.

    Ends after
    30 s, or with
    --now at once:

    - an item
      of two lines
    - another
    1. a first
    2) a second

        $ an example
        $ of two lines
    """


def without_help() -> None:
    pass


def test_only_lines_of_a_paragraph_are_joined() -> None:
    assert (help_of(command) or "").split("\n") == [
        "Do it.",
        "",
        "Ends after 30 s, or with --now at once:",
        "",
        "- an item",
        "  of two lines",
        "- another",
        "1. a first",
        "2) a second",
        "",
        "    $ an example",
        "    $ of two lines",
    ]
    assert help_of(without_help) is None
