"""Field names of OpenAI, vLLM, SGLang and transformers, with the equivalent here.

Errors show the hint if such a name or value is given. Each text completes "there is no such field; …".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


def _same(**names: str) -> dict[str, str]:
    """Return hints for fields that differ only in name, given as ``ours="theirs theirs"``."""
    return {other: f"did you mean {own!r}?" for own, others in names.items() for other in others.split()}


_GRAMMAR: Final = "a grammar is given as structured_output=JsonSchema(…), RegexGrammar(…) or EbnfGrammar(…)"
_FORBID: Final = "to forbid tokens, give logit_processors=[DisallowedTokens(token_ids=…)]"
_CALL: Final = "it is an argument of generate(), beside the sampling params"
_BEAMS: Final = "there is no beam search; tokens are sampled, or greedy with temperature=0"

SAMPLING_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    _same(
        max_new_tokens="max_tokens max_completion_tokens max_output_tokens max_gen_toks max_gen_len num_predict",
        min_new_tokens="min_tokens",
        n="num_return_sequences num_samples num_generations best_of num_completions",
        seed="random_seed sampling_seed",
        stop="stop_strings stop_sequences stop_words stop_str until",
        stop_token_ids="eos_token_id eos_token_ids stop_ids",
        logprobs="top_logprobs num_logprobs top_logprobs_num return_logprob return_logprobs output_logprobs",
        prompt_logprobs="input_logprobs num_prompt_logprobs",
        logit_processors="logits_processors logits_processor custom_logit_processor",
        repetition_penalty="repeat_penalty",
        return_hidden_states="output_hidden_states",
        return_routed_experts="return_expert_ids output_router_logits",
        return_prompt_routed_experts="routed_experts_prompt_start return_input_experts",
        return_sampling_mask="sampling_mask output_sampling_mask",
        structured_output="structured_outputs",
        temperature="temp",
    )
    | dict.fromkeys(
        "json_schema response_format guided_json guided_regex guided_grammar guided_choice guided_decoding regex ebnf "
        "grammar structural_tag".split(),
        _GRAMMAR,
    )
    | dict.fromkeys("bad_words bad_words_ids suppress_tokens".split(), _FORBID)
    | dict.fromkeys("num_beams use_beam_search beam_width length_penalty early_stopping".split(), _BEAMS)
    | dict.fromkeys("request_id request_ids priority lora timeout lora_request".split(), _CALL)
    | {
        "max_length": "max_new_tokens counts the output alone; context_length of the engine bounds both together",
        "min_length": "min_new_tokens counts the output alone",
        "do_sample": "did you mean 'temperature'? 0 is greedy, all else is sampled",
        "greedy": "did you mean 'temperature'? 0 is greedy",
        "allowed_token_ids": "to allow some tokens only, give logit_processors=[ActionMask(allowed_token_ids=…)]",
        "no_stop_trim": "did you mean 'include_stop_str_in_output'?",
        "detokenize": "text is decoded when it is first read; leave it out",
        "spaces_between_special_tokens": "text is what the tokenizer decodes; leave it out",
        "truncate_prompt_tokens": "prompts are not truncated; shorten the prompt",
        "stream": "call generate_stream()",
        "extra_args": "there is no such place; each field of the engine's that is known here has a name here",
    }
)
SAMPLING_VALUES: Final[Mapping[tuple[str, object], str]] = MappingProxyType(
    {
        ("top_k", -1): "0 is off",
        ("top_p", 0): "1 is off; greedy is temperature=0",
        ("top_p", -1): "1 is off",
        ("repetition_penalty", 0): "1 is off",
        ("temperature", -1): "0 is greedy",
        ("max_new_tokens", -1): "None goes on up to the context length",
        ("min_new_tokens", -1): "0 is off",
        ("seed", -1): "leave it out for another random stream each time",
        ("logprobs", True): "0 is for the sampled tokens' alone, k for the k most likely ones too",
        ("logprobs", False): "leave it out for none",
        ("logprobs", -1): "give the size of the vocabulary for all of it",
        ("prompt_logprobs", True): "0 is for the prompt's tokens alone, k for the k most likely ones too",
        ("prompt_logprobs", False): "leave it out for none",
        ("prompt_logprobs", -1): "give the size of the vocabulary for all of it",
    }
)

CONFIG_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    _same(
        backend="engine engine_type inference_backend rollout_backend",
        model="model_path model_name model_name_or_path model_id pretrained_model_name_or_path served_model_name",
        tokenizer="tokenizer_path tokenizer_name tokenizer_name_or_path",
        dtype="torch_dtype precision",
        device="device_map",
        tensor_parallel_size="tp tp_size tensor_model_parallel_size",
        pipeline_parallel_size="pp pp_size pipeline_model_parallel_size",
        data_parallel_size="dp dp_size",
        expert_parallel_size="ep ep_size enable_expert_parallel",
        gpu_memory_utilization="mem_fraction_static mem_fraction",
        max_num_batched_tokens="chunked_prefill_size",
        max_num_seqs="max_running_requests max_batch_size",
        context_length="max_model_len max_seq_len max_length max_seq_length",
        max_loras="max_loras_per_batch max_loaded_loras",
        seed="random_seed",
        deterministic="enable_deterministic_inference",
        enable_sleep="enable_sleep_mode enable_memory_saver",
        tool_call_parser="tool_parser tool_call_format enable_auto_tool_choice",
        endpoint="base_url api_base url host port server_url",
        endpoint_api_key="api_key key token",
        engine_kwargs="engine_args server_args llm_kwargs kwargs extra_args",
    )
    | {
        "disable_radix_cache": "did you mean 'enable_prefix_caching'?",
        "allowed_media_domains": "media={'allow_private_hosts': False} keeps to public hosts; check names yourself",
        "allowed_local_media_path": "URLs never name files; check paths before passing them",
        "media_url_max_file_size_mb": "did you mean 'media', with 'max_bytes'?",
    }
    | dict.fromkeys(
        "enforce_eager quantization kv_cache_dtype load_format swap_space block_size cuda_graph_max_bs".split(),
        "the engine's own arguments go into engine_kwargs",
    )
)

PAYLOAD_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    _same(
        max_tokens="max_new_tokens max_output_tokens max_completion_tokens",  # the last: a real field of chats
        min_tokens="min_new_tokens",
        stop="stop_sequences stop_strings",
        logit_processors="logits_processors custom_logit_processor",
        lora="lora_path lora_request",
        request_id="rid",
    )
    | dict.fromkeys(
        "guided_json guided_regex guided_grammar guided_choice json_schema regex ebnf structured_outputs".split(),
        "use response_format, or structured_output",
    )
    | {
        "chat_template": "a chat is rendered with the model's own; its variables go into chat_template_kwargs",
        "return_token_ids": "token ids are always returned; leave it out",
        "tool_call_parser": "it is a field of the engine's configuration",
    }
)
