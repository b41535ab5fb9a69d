"""docs/reference/wire.md agrees with the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.process.process_tree import MARK
from drivetrain.process.rpc_methods import METHODS, Method
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


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_is_on_the_page_with_its_types(method: Method) -> None:
    assert f"\n{method}\n" in PAGE, "a changed method is a new wire version: raise WIRE_VERSION and mend the page"


def test_no_other_method_is_on_the_page() -> None:
    listed = PAGE.split("<!-- methods -->")[1].split("<!-- /methods -->")[0].strip().removeprefix("```text\n")
    assert len(listed.removesuffix("\n```").splitlines()) == len(METHODS)


def test_the_mark_is_on_the_page() -> None:
    assert f"`{MARK}`" in PAGE
