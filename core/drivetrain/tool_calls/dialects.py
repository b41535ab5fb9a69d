"""Table of the syntaxes in which models write tool calls. A model writes the one it was trained on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from drivetrain.tool_calls.functions import Block, Call, Functions
from drivetrain.tool_calls.json_calls import EitherWay, NamedBefore, NamedWithin, whole_json
from drivetrain.tool_calls.python_calls import Enclosed, whole_python
from drivetrain.tool_calls.tagged_calls import Tagged


@dataclass(frozen=True, slots=True)
class Dialect:
    """One tool-call syntax."""

    names: tuple[str, ...]
    """Names for ``tool_call_parser``: vLLM's and SGLang's."""
    mark: re.Pattern[str]
    """Matches in the chat templates of models that use this syntax."""
    opening: re.Pattern[str] | None = None
    """Matches where a block of calls may begin."""
    read: Callable[[Functions, str, re.Match[str]], Block | None] | None = None
    """Reads the block that begins at a match of ``opening``."""
    whole: Callable[[Functions, str], list[Call]] | None = None
    """Reads a text that consists only of calls."""


def _dialect(
    names: str,
    mark: str,
    opening: str = "",
    read: Callable[[Functions, str, re.Match[str]], Block | None] | None = None,
    whole: Callable[[Functions, str], list[Call]] | None = None,
) -> Dialect:
    return Dialect(tuple(names.split()), re.compile(mark), re.compile(opening) if opening else None, read, whole)


# A text may be adversarial, such as ten thousand spaces, and the time must not grow with the square of its length. So
# ambiguous repetitions are possessive (*+, ++), and long spans are found with str.find.
ALL: Final[tuple[Dialect, ...]] = (
    _dialect(
        "qwen3_coder qwen3_xml seed_oss step3p5",
        "<function=",
        r"(?:<(?:seed:)?tool_call>\s*+)?+<function=(?P<name>[^<>\s]++)>",
        Tagged(r"<parameter=(?P<key>[^<>\n]++)>", "</parameter>", "</function>", "</(?:seed:)?tool_call>"),
    ),
    _dialect(
        "glm45 glm47 glm hunyuan hy_v3",
        "<arg_key>",
        r"<tool_call>\s*+(?P<name>[^\s<{\[]++)\s*+(?:<tool_sep>\s*+)?+(?=<arg_key>|</tool_call>)",
        Tagged(r"<arg_key>(?P<key>[^<]*+)</arg_key>\s*+<arg_value>", "</arg_value>", "</tool_call>"),
    ),
    _dialect(
        "deepseek_v32 deepseek_v4 deepseekv32 deepseekv4",
        "｜DSML｜",
        r'(?:<｜DSML｜(?:function|tool)_calls>\s*+)?+<｜DSML｜invoke name="(?P<name>[^"<>]++)"\s*+/?+>',
        Tagged(
            r'<｜DSML｜parameter name="(?P<key>[^"<>]++)"(?:\s++string="(?P<text>true|false)")?+\s*+>',
            "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
            "</｜DSML｜(?:function|tool)_calls>",
        ),
    ),
    _dialect(
        "step3",
        "steptml:invoke",
        r"(?:<｜tool_calls_begin｜>\s*+)?+(?:<｜tool_call_begin｜>\s*+)?+(?:function<｜tool_sep｜>\s*+)?+"
        r'<steptml:invoke name="(?P<name>[^"<>]++)">',
        Tagged(
            r'<steptml:parameter name="(?P<key>[^"<>]++)">',
            "</steptml:parameter>",
            "</steptml:invoke>",
            r"<｜tool_call_end｜>(?:\s*+<｜tool_calls_end｜>)?+",
        ),
    ),
    _dialect(
        "minimax_m2 minimax-m2",
        "<minimax:tool_call>|<invoke name=",
        r'(?:<minimax:tool_call>\s*+)?+<invoke name="(?P<name>[^"<>]++)">',
        Tagged(r'<parameter name="(?P<key>[^"<>]++)">', "</parameter>", "</invoke>", "</minimax:tool_call>"),
    ),
    _dialect(
        "deepseek_v3 deepseek_v31 deepseekv3 deepseekv31",
        "<｜tool▁call▁begin｜>",
        r"(?:<｜tool▁calls▁begin｜>\s*+)?+<｜tool▁call▁begin｜>\s*+(?:function<｜tool▁sep｜>(?=[^\s<]++\s*+```json))?+"
        r"(?P<name>[^\s<]++)\s*+(?:```json|<｜tool▁sep｜>)",
        NamedBefore(r"(?:```\s*+)?+<｜tool▁call▁end｜>(?:\s*+<｜tool▁calls▁end｜>)?+|```"),
    ),
    _dialect(
        "kimi_k2",
        r"<\|tool_call_begin\|>",
        r"(?:<\|tool_calls_section_begin\|>\s*+)?+<\|tool_call_begin\|>\s*+(?:functions\.)?+(?P<name>[^\s<:]++)"
        r"(?::[0-9]++)?+\s*+<\|tool_call_argument_begin\|>",
        NamedBefore(r"<\|tool_call_end\|>(?:\s*+<\|tool_calls_section_end\|>)?+"),
    ),
    _dialect(
        "mistral",
        r"\[TOOL_CALLS\]",
        r"\[TOOL_CALLS\]\s*+(?:(?P<name>[^\s\[{<]++)\s*+(?:\[CALL_ID\][^\s\[]*+)?+(?:\[ARGS\])?+\s*+(?=\{))?",
        EitherWay(),
    ),
    _dialect(
        "openai gpt-oss",
        r"to=functions\.|<\|channel\|>commentary",
        r"(?:<\|start\|>assistant\s*+)?+(?:<\|channel\|>\w++\s*+)?+to=functions\.(?P<name>[\w.-]++)"
        r"\s*+(?:<\|channel\|>\w++\s*+)?+(?:(?:<\|constrain\|>)?+json\s*+)?+<\|message\|>",
        NamedBefore(r"<\|call\|>"),
    ),
    _dialect("lfm2", r"<\|tool_call_start\|>", r"<\|tool_call_start\|>", Enclosed("<|tool_call_end|>")),
    _dialect("olmo3", "<function_calls>", "<function_calls>", Enclosed("</function_calls>"), whole_python),
    _dialect(
        "pythonic llama4_pythonic",
        r"<\|python_start\|>|\[func_name1\(",
        r"<\|python_start\|>",
        Enclosed("<|python_end|>"),
        whole_python,
    ),
    _dialect("longcat", "<longcat_tool_call>", r"<longcat_tool_call>\s*+", NamedWithin("</longcat_tool_call>")),
    _dialect(
        "internlm interns1",
        r"<\|action_start\|>",
        r"<\|action_start\|>\s*+<\|plugin\|>",
        NamedWithin(r"<\|action_end\|>"),
    ),
    _dialect("granite", r"<\|tool_call\|>", r"<\|tool_call\|>\s*+", NamedWithin(r"<\|/tool_call\|>")),
    _dialect("phi4_mini_json", "functools", r"functools\s*+(?=\[)", NamedWithin()),
    _dialect("jamba hunyuan_a13b", r"<tool_calls>\s*\[", r"<tool_calls>\s*+(?=\[)", NamedWithin("</tool_calls>")),
    _dialect(
        "hermes qwen qwen25 qwen3_json granite4",
        "<tool_call>",
        r"<tool_call>\s*+(?=[\[{])",
        NamedWithin("</tool_call>"),
    ),
    _dialect(
        "llama3_json llama3 llama4_json",
        r'<\|python_tag\|>|"parameters": dictionary',
        r"<\|python_tag\|>",
        Enclosed("<|eom_id|>"),
        whole_json,
    ),
)
DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType({name: dialect for dialect in ALL for name in dialect.names})


@lru_cache(maxsize=64)
def dialects_for(parser: str | None, template: str | None) -> tuple[Dialect, ...]:
    """Return the syntaxes in which a model's calls are read.

    Args:
        parser: A name of :data:`DIALECTS`; None: detect the syntax from the template.
        template: The model's chat template. If it shows no known syntax, all syntaxes are tried.
    """
    if parser is not None:
        return (DIALECTS[parser],)
    told = next((dialect for dialect in ALL if template and dialect.mark.search(template)), None)
    return (told,) if told else ALL
