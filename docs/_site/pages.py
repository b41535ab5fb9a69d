"""Pages of the site that are made while it is built, and links that lead out of ``docs``.

A link in a Markdown file leads to a file of the repository, so that it works wherever the file is read. The site holds
``CHANGELOG.md`` and ``CONTRIBUTING.md`` as pages; any other file outside ``docs`` that a page links to is copied to
``repository/``. ``<!-- made: NAME [ARGUMENT] -->`` in a page stands for a table that is made from the code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import drivetrain
from drivetrain import Capability
from drivetrain.cli.app import BUILT_IN
from drivetrain.cli.extensions import add_extensions

ROOT = Path(__file__).parents[2]
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing/index.md"}
"""Files of the repository's root that are pages, and where."""
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=[)\s])")
_LARGE = 1e6
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_MADE = re.compile(r"^<!-- made: (\w+)(?: (\w+))? -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside ``docs``, and the files that pages link to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for file in list(files):
        if file.is_documentation_page():
            for target in _targets(_repository_path(file.src_uri), file.content_string):
                here = _site_path(target)
                if (
                    files.get_file_from_path(here) is None
                    and (ROOT / target).is_file()
                    and here.startswith("repository/")
                ):
                    files.append(File.generated(config, here, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links to files of the repository into links within the site, and put tables in their places."""
    source = page.file.src_uri
    markdown = _MADE.sub(lambda found: MAKERS[found[1]](*filter(None, [found[2]])), markdown)

    def moved(link: re.Match[str]) -> str:
        target = _resolved(_repository_path(source), link[1])
        return f"{os.path.relpath(_site_path(target), PurePosixPath(source).parent)}{link[2] or ''}"

    return _outside_code(lambda text: _LINK.sub(moved, text), markdown)


def _outside_code(change: Callable[[str], str], markdown: str) -> str:
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _targets(source: str, markdown: str) -> list[str]:
    return [_resolved(source, link[1]) for link in _LINK.finditer(_FENCE.sub("", markdown))]


def _resolved(source: str, link: str) -> str:
    return os.path.normpath(PurePosixPath(source).parent / link)


def _repository_path(page: str) -> str:
    return next((source for source, made in PAGES.items() if made == page), f"docs/{page}")


def _site_path(target: str) -> str:
    """Where the site has a file or folder of the repository."""
    if target in PAGES:
        return PAGES[target]
    if target == "README.md":
        return "index.md"
    if (ROOT / target).is_dir():
        target = f"{target}/README.md"
    if target.startswith("docs/") and target.endswith(".md"):
        return target.removeprefix("docs/")
    # A page of its own would be rendered from Markdown that is written for another place.
    return f"repository/{target.removesuffix('.md')}{'.txt' if target.endswith('.md') else ''}"


# What is made from the code -------------------------------------------------------------------------------------------


def _capabilities() -> str:
    rows = [f"| `{capability.value}` | {capability.meaning} |" for capability in Capability]
    return "\n".join(["| capability | meaning |", "|---|---|", *rows])


def _command_line() -> str:
    app = typer.Typer()
    for name, command in BUILT_IN.items():
        app.command(name)(command)
    add_extensions(app, taken=BUILT_IN, wanted=None)
    group = typer.main.get_command(app)
    parts: list[str] = []
    for name, command in sorted(group.commands.items()):
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(["drivetrain", name, *command.collect_usage_pieces(context)])
        rows = [option.get_help_record(context) for option in command.params]
        parts += [f"## drivetrain {name}", command.help or "", f"```console\n$ {usage}\n```"]
        parts += ["\n".join(["| argument | |", "|---|---|", *(_row(*record) for record in rows if record)])]
    return "\n\n".join(parts)


def _fields(name: str) -> str:
    model: type[BaseModel] = getattr(drivetrain, name)
    rows = [
        f"| `{field}` | `{_cell(_type(info.annotation))}` | {_default(info)} "
        f"| {_cell(info.description or '')}{_bounds(info)} |"
        for field, info in model.model_fields.items()
    ]
    return "\n".join(["| field | type | default | |", "|---|---|---|---|", *rows])


def _type(annotation: object) -> str:
    """A type in words that a reader needs; bounds stand in the description."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(_type(one) for one in arguments)
    if origin is Literal:
        return " | ".join(repr(one) for one in arguments)
    if origin is not None:
        inner = ", ".join("…" if one is Ellipsis else _type(one) for one in arguments)
        return f"{origin.__name__}[{inner}]"
    return "None" if annotation is NoneType else getattr(annotation, "__name__", str(annotation))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if info.default_factory is not None:
        made = info.default_factory()  # type: ignore[call-arg]
        return f"`{type(made).__name__}()`" if isinstance(made, BaseModel) else f"`{made!r}`"
    return f"`{info.default.value!r}`" if isinstance(info.default, Enum) else f"`{info.default!r}`"


def _bounds(info: FieldInfo) -> str:
    """Bounds that are declared on the field itself; those that only keep a number within its type are left out."""
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [
        f"{signs[name]} {bound:g}"
        for one in info.metadata
        for name in signs
        if isinstance(bound := getattr(one, name, None), int | float) and abs(bound) <= _LARGE
    ]
    return f" ({', '.join(found)})" if found else ""


def _row(names: str, help_text: str) -> str:
    return f"| `{_cell(names)}` | {_cell(help_text)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


MAKERS: dict[str, Callable[..., str]] = {
    "capabilities": _capabilities,
    "command_line": _command_line,
    "fields": _fields,
}
