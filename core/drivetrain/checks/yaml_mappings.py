"""YAML in which no key of a mapping is given twice. PyYAML keeps the last one, and drops the others without a word."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import ComposerError

from drivetrain.checks.pydantic_errors import shown_name


class _Loader(yaml.SafeLoader):
    # Not when the mapping is constructed: a merge (``<<``) has added keys by then, which the mapping's own override.
    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    problem = f"{shown_name(key.value)!r} is given twice"
                    raise ComposerError(problem=problem, problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


def load_yaml(text: str) -> object:
    """Return the value that YAML describes.

    Raises:
        yaml.YAMLError: it is no YAML, or a mapping has a key twice.
    """
    return yaml.load(text, _Loader)
