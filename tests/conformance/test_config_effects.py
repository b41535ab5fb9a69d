"""Each configuration field has something that looks at its effect: a mutant that drops it, or what is named here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain import EngineConfig
from drivetrain_conformance import mutants

ROOT = Path(__file__).parents[2]

CASES = "conformance_tests/drivetrain_conformance/cases"
ELSEWHERE = {
    "attention_backend": "tests/transformers/test_translate.py::test_the_model_has_the_attention_that_is_asked_for",
    "backend": "tests/process/test_start.py::test_a_probe_raises_what_describing_the_backend_raised",
    "data_parallel_size": f"{CASES}/parallel.py::two_replicas",
    "device": "tests/transformers/test_translate.py::test_the_model_is_on_the_device_that_is_asked_for",
    "enable_lora": f"{CASES}/lora.py::adapters_without_enable_lora",
    "enable_sleep": "tests/sglang/test_translate.py::test_memory_is_made_ready_for_sleep_if_it_is_asked_for",
    "endpoint": "tests/sglang/test_remote.py::test_nobody_there_is_an_error_in_time",
    "endpoint_api_key": "tests/sglang/test_remote.py::test_a_host_process_gets_the_key",
    "expert_parallel_size": f"{CASES}/parallel.py::experts_split_over_two_ranks",
    "gpu_memory_utilization": "tests/core/test_engine_adapters.py::test_a_share_of_a_gpu_is_refused_without_one",
    "isolation": f"{CASES}/faults.py::a_host_killed_while_it_starts",
    "logprobs_mode": f"{CASES}/lifecycle/starting_and_closing.py::_check_logprobs_mode",
    "max_loras": f"{CASES}/lora.py::no_more_adapters_than_the_limit",
    "pipeline_parallel_size": f"{CASES}/parallel.py::one_layer_after_another_on_two_ranks",
    "python": "tests/process/test_start.py::test_the_host_can_be_another_environments_python",
    "revision": "tests/transformers/test_hub_models.py::test_a_revision_is_that_revision_in_all_files",
    "seed": f"{CASES}/sampling.py::a_configured_seed_repeats_a_run",
    "tensor_parallel_size": f"{CASES}/parallel.py::layers_split_over_two_ranks",
    "timeouts": "tests/transformers/test_bounds.py::test_a_scheduler_that_does_not_come_back_from_a_step_is_found_out",
}
"""Fields without a mutant, and the case or test of each that sets the field and looks at what it does."""


def trees() -> Iterator[ast.AST]:
    for path in sorted(Path(mutants.__path__[0]).glob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def keys_in(node: ast.AST) -> set[str]:
    """Keys of the dictionaries within ``node``."""
    dictionaries = (one for one in ast.walk(node) if isinstance(one, ast.Dict))
    return {str(key.value) for one in dictionaries for key in one.keys if isinstance(key, ast.Constant)}


def is_config_mutant(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(one, ast.Call) and ast.unparse(one.func) == "config_mutant" for one in node.decorator_list
    )


def copies_a_config(node: ast.AST) -> bool:
    """Return whether ``node`` is a call of ``config.model_copy``."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "model_copy"
        and ast.unparse(node.func.value).endswith("config")
    )


def dropped_by_mutants() -> set[str]:
    """Fields that a mutant changes on their way to the engine: ``make mutants`` shows that a case sees each of them."""
    changing = (node for tree in trees() for node in ast.walk(tree) if is_config_mutant(node) or copies_a_config(node))
    return set[str]().union(*map(keys_in, changing)) & set(EngineConfig.model_fields)


def function_at(place: str) -> str:
    """Return the source of a function with its decorators; "" if there is no such function."""
    file, _, name = place.partition("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return "\n".join(ast.unparse(part) for part in (*node.decorator_list, node))
    return ""


def test_each_field_has_a_mutant_or_a_test() -> None:
    without = set(EngineConfig.model_fields) - dropped_by_mutants()
    assert without - ELSEWHERE.keys() == set(), "nothing looks at the effect of these fields"
    assert ELSEWHERE.keys() - without == set(), "a mutant drops these fields; take them out of the table"


@pytest.mark.parametrize("field", ELSEWHERE)
def test_what_is_named_sets_the_field(field: str) -> None:
    assert re.search(rf"\b{field}\b", function_at(ELSEWHERE[field])), f"{ELSEWHERE[field]} does not set {field}"
