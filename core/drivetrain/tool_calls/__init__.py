"""Parsing of tool calls in a model's text."""

from __future__ import annotations

from drivetrain.tool_calls.dialects import ALL, DIALECTS, Dialect, dialects_for
from drivetrain.tool_calls.parse import ParsedText, parse_tool_calls

__all__ = ["ALL", "DIALECTS", "Dialect", "ParsedText", "dialects_for", "parse_tool_calls"]
