"""Tiny models whose chat template shows the tools of a request."""

from __future__ import annotations

import shutil
from pathlib import Path

from drivetrain.testing import tiny_model


def model_that_reads_tools(folder: Path) -> Path:
    """Write a copy of the tiny Qwen2 whose chat template shows the tools; return the folder."""
    shutil.copytree(tiny_model("qwen2"), folder)
    template = folder / "chat_template.jinja"
    tools = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    template.write_text(tools + template.read_text(encoding="utf-8"), encoding="utf-8")
    return folder
