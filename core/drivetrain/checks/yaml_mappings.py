"""YAML in which no key of a mapping is given twice. PyYAML keeps the last one, and drops the others without a word."""

from __future__ import annotations

from collections.abc import Hashable

import yaml

from drivetrain.checks.pydantic_errors import shown_name


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    problem = f"{shown_name(key.value)!r} is given twice"
                    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> object:
    """Return the value that YAML describes.

    Raises:
        yaml.YAMLError: it is no YAML, or a mapping has a key twice.
    """
    return yaml.load(text, _Loader)
