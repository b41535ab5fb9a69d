"""A private member is read by its own class alone: in the product, the conformance suite and the tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    *("core", "backends", "weight_sync", "sampling", "fleet", "serving", "trainers"),
    *("conformance_tests", "demo", "examples", "benchmarks", "tests"),
)
FOREIGN = {
    # Names with a dot include the object: our code has a private member of the same name.
    "documented by Python": "_exit _replace _value_",
    "Python, to end a forked process as if it were the first one": "_shutdown _run_exitfuncs",
    "Python, to end its helper processes before processes are counted": "_forkserver _resource_tracker"
    " _forkserver._stop _resource_tracker._stop",
    "torch's modules and storages": "layer._parameters part._parameters module._parameters owner._parameters"
    " module._buffers owner._buffers part._buffers _modules _non_persistent_buffers_set _cdata _C"
    " _construct_storage_from_data_pointer _disabled_torch_function_impl",
    "torch's operations": "_foreach_copy_ _foreach_mul_ _foreach_zero_ _local_scalar_dense _schema _to_copy"
    " _unsafe_view",
    "torch.distributed": "_Options options._devices options._timeout _start_coalescing _end_coalescing"
    " _get_default_store _new_process_group_helper _world",
    "Triton's interpreter": "_convert_float",
    "transformers": "_attn_implementation Fast._decode type(inner)._decode Fast._encode_plus gate._weight_fp32",
    "SGLang": "_async_d2h _build_transcription_prompt _engine_paused _get_feat_extract_output_lengths"
    " manager._logical_rids"
    " _manager._dispatch_to_scheduler _request_dispatcher _scheduler_init_result",
    "vLLM": "manager._adapter_manager manager._active_adapters slots._active_adapters manager._registered_adapters"
    " slots._registered_adapters _manager._get_lora_layer_weights _all_stop_token_ids _free_request_blocks"
    " _get_original_loader _get_prompt_logprobs_dict _handle_client_request manager._load_adapter"
    " _lora_model_cls _pad_moe_intermediate_for_grouped_gemm GPUModelRunner._sample _supports_onednn"
    " _update_prompt_logprobs _update_request_with_output _update_states _verify_aux_output_compatibility",
    "TRL": "_AsyncRolloutLoop _async_tool_dicts loop._generate_one_turn _generate_single_turn _iter_named_params"
    " loop._loop _stop_event _streaming_iter _sync_tool_dicts training._tokenize_prompts"
    " trainer._tokenize_prompts _tool_call_loop",
    "verl": "_ROLLOUT_REGISTRY _get_teacher_sampling_params",
    "OpenRLHF, AReaL, SkyRL, NeMo-Gym and slime": "_dispatch_prompts_to_vllm _mm_pad_token_ids _workflow_executor"
    " SingletonMeta._instances"
    " _get_session _GLOBAL_AIOHTTP_CLIENT",
}
"""Private members of other projects that are used, by their owner. Ours are not listed here: make them public."""
ALLOWED = frozenset(" ".join(FOREIGN.values()).split())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_own(node: ast.Attribute) -> bool:
    """Return True for ``self._x``, ``cls._x`` and ``super()._x``."""
    match node.value:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
        case _:
            return False


def defined(owner: ast.ClassDef) -> Iterator[str]:
    """Yield the private members that a class defines: methods, fields, and what it sets on itself."""
    for node in ast.walk(owner):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if is_private(name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) if is_private(name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) if is_private(name) and is_own(node):
                yield name


@dataclass(frozen=True)
class Members:
    """Private names of one module."""

    ours: dict[ast.ClassDef, set[str]]
    """The names that each class defines."""
    uses: list[tuple[int, str]]
    """Line and text of each use of a name that no enclosing class defines."""

    @classmethod
    def of(cls, text: str) -> Members:
        nodes = list(ast.walk(ast.parse(text)))
        ours = {node: set(defined(node)) for node in nodes if isinstance(node, ast.ClassDef)}
        uses = list[tuple[int, str]]()
        for node in nodes:
            if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node):
                around = [names for one, names in ours.items() if one.lineno <= node.lineno <= (one.end_lineno or 0)]
                if not any(node.attr in names for names in around):
                    uses.append((node.lineno, ast.unparse(node)))
            elif isinstance(node, ast.ImportFrom):
                uses += [(node.lineno, one.name) for one in node.names if is_private(one.name)]
        return cls(ours, uses)


@pytest.fixture(scope="module")
def members() -> dict[Path, Members]:
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT): Members.of(path.read_text(encoding="utf-8")) for path in paths}


def is_allowed(use: str) -> bool:
    *objects, name = use.split(".")
    return name in ALLOWED or f"{objects[-1] if objects else ''}.{name}" in ALLOWED


def test_no_private_member_of_ours_is_used_by_another_class_or_module(members: dict[Path, Members]) -> None:
    found = [f"{path}:{line}: {use}" for path, one in members.items() for line, use in one.uses if not is_allowed(use)]
    assert found == []


def test_every_listed_name_is_used_and_is_not_ours(members: dict[Path, Members]) -> None:
    used = {use for one in members.values() for _, use in one.uses}
    assert {name for name in ALLOWED if not any(use.endswith(name) for use in used)} == set()
    ours = {name for one in members.values() for names in one.ours.values() for name in names}
    assert ALLOWED & ours == set(), "name the object too, as in 'options._timeout'"


def test_the_check_finds_what_it_looks_for() -> None:
    text = """
from ours import _helper
class One:
    _field: int
    def _method(self): self._own = other._own = other._field; other._method()
    def read(self, other): return self._inherited, other._theirs, os._exit
other._own
"""
    found = [use for _, use in Members.of(text).uses if not is_allowed(use)]
    assert sorted(found) == ["_helper", "other._own", "other._theirs"]
