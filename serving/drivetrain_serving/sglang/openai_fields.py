"""SGLang's own fields of OpenAI's requests, translated to vLLM's fields, which the routes read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from drivetrain.checks.safe_repr import shown
from drivetrain.errors import InvalidRequest
from drivetrain.text.chat_templates import reads_variable
from drivetrain_serving.served_engine import ServedEngine
from drivetrain_serving.sglang.sampling import TOP_P_TOKEN_IDS

_GRAMMARS: Final = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
"""SGLang's name of a grammar → its name in ``structured_outputs``."""
_REFUSED: Final = (
    *("custom_logit_processor", "images_config", "input_ids", "no_stop_trim", "return_cached_tokens_details"),
    *("return_flat_raw_output_top_logprobs", "return_hidden_states", "return_input_ids_in_sglext", "return_meta_info"),
    *("return_output_ids_in_sglext", "return_prompt_token_ids", "return_routed_experts", "return_sampling_mask"),
    *("return_spec_tokens_details", "sampling_logprobs_mode", "session_params", "video_config", "watermark"),
)
"""Fields that change the answer and are not honoured; null, false and empty values are taken."""


def translated(body: Mapping[str, object], served: ServedEngine) -> Mapping[str, object]:
    """Return the request with ``rid``, ``lora_path``, grammars and ``priority`` in vLLM's words.

    Raises:
        InvalidRequest: a field cannot be honoured.
    """
    for name in _REFUSED:
        if body.get(name):
            raise InvalidRequest(f"{name}={shown(body[name])} is not supported; leave it out", field=name)
    custom = body.get("custom_params")
    if isinstance(custom, Mapping) and custom.get(TOP_P_TOKEN_IDS):
        name = f"custom_params.{TOP_P_TOKEN_IDS}"
        raise InvalidRequest(f"{name} is not supported here; send the request to /generate", field=name)
    fields = {name: value for name, value in body.items() if name not in _GRAMMARS}
    if (rid := _text(fields, "rid")) is not None:
        fields["request_id"] = rid
    adapter = _text(fields, "lora_path") or _adapter_in(fields.get("model"), served)
    if adapter is not None:
        fields["model"] = adapter
    grammars = {ours: body[theirs] for theirs, ours in _GRAMMARS.items() if body.get(theirs) is not None}
    if grammars:
        fields["structured_outputs"] = grammars
    if not fields.get("stream"):
        fields.pop("stream_options", None)  # SGLang ignores them then, and vLLM refuses them
    effort, variables = fields.get("reasoning_effort"), fields.get("chat_template_kwargs") or {}
    if effort is not None and "messages" in fields and isinstance(variables, Mapping):
        template = served.engine.tokenizer.chat_template(()) or ""
        thinking = {"thinking": effort != "none"} if reads_variable(template, "thinking") else {}
        fields["chat_template_kwargs"] = {**thinking, **variables}
    priority = fields.get("priority")
    if isinstance(priority, int):
        fields["priority"] = -priority  # higher is sooner here; the routes read vLLM's order
    return fields


def _text(fields: dict[str, object], name: str) -> str | None:
    value = fields.pop(name, None)
    if value is None or isinstance(value, str):
        return value or None
    raise InvalidRequest(f"{name}={shown(value)}: expected one text", field=name)


def _adapter_in(model: object, served: ServedEngine) -> str | None:
    """Return the adapter of ``BASE:ADAPTER``; None if the model is named in another way."""
    if not isinstance(model, str) or served.is_model(model):
        return None
    base, _, adapter = model.rpartition(":")
    return adapter if adapter and served.is_model(base) else None
