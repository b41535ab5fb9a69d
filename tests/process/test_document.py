"""docs/reference/wire.md agrees with the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.process.process_tree import MARK
from drivetrain.process.rpc_methods import METHODS, SHARED_METHODS, Method
from drivetrain.process.wire import MESSAGES, WIRE_VERSION, Message

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "wire.md").read_text(encoding="utf-8")


def test_the_page_is_about_this_wire_version() -> None:
    assert f"**wire version {WIRE_VERSION}**" in PAGE, (
        "if the protocol changed, raise WIRE_VERSION and describe the change on the page"
    )


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_every_message_is_on_the_page_with_its_fields_in_order(message: type[Message]) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{message.__name__}` |")]
    fields = row.split("|")[3]
    assert [word for word in fields.split("`")[1::2]] == list(message.__struct_fields__)


LISTS = {"methods": METHODS, "holders' methods": SHARED_METHODS}


@pytest.mark.parametrize(("title", "method"), [(title, method) for title in LISTS for method in LISTS[title].values()])
def test_every_method_is_on_the_page_with_its_types(title: str, method: Method) -> None:
    assert str(method) in listed(title), "a changed method is a new wire version: raise WIRE_VERSION and mend the page"


@pytest.mark.parametrize("title", LISTS)
def test_no_other_method_is_on_the_page(title: str) -> None:
    assert len(listed(title)) == len(LISTS[title])


def listed(title: str) -> list[str]:
    """Return the lines of a list of methods."""
    return PAGE.split(f"<!-- {title} -->")[1].split(f"<!-- /{title} -->")[0].strip().splitlines()[1:-1]


def test_the_mark_is_on_the_page() -> None:
    assert f"`{MARK}`" in PAGE
