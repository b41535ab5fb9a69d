"""Docstrings as the site shows them: roles of Sphinx, which the source uses, become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|exc):`~?([^`]+)`")


def _without_roles(text: str) -> str:
    return _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2] if '~' in role[0] else role[1]}`", text)


class WithoutRoles(griffe.Extension):
    """Replaces ``:class:`~a.b.C``` by ``C`` in every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _without_roles(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Change one attribute's docstring."""
        if attr.docstring is not None:
            attr.docstring.value = _without_roles(attr.docstring.value)
