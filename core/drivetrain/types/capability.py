"""Capabilities: the features that an engine supports, as data.

A capability is claimed or unclaimed; there is no third state. Claimed means that it works. A request that needs an
unclaimed one is refused with :class:`~drivetrain.errors.UnsupportedCapability` before any work.
"""

from __future__ import annotations

from enum import Enum


class Capability(Enum):
    """One feature of an engine. The value is its name in files; ``meaning`` describes it in one sentence."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Capability:
        member = object.__new__(cls)
        member._value_ = value
        member.meaning = meaning
        return member

    # Generation
    STREAMING = "streaming", "Tokens can be streamed while they are generated."
    ABORT = "abort", "A request can be aborted and returns its tokens so far."
    LOGPROBS_RAW = "logprobs_raw", "Logprobs of the model's own distribution, before temperature, can be returned."
    LOGPROBS_TEMPERATURE = (
        "logprobs_temperature",
        "Logprobs after temperature alone, as a trainer recomputes them from its logits, can be returned.",
    )
    LOGPROBS_PROCESSED = "logprobs_processed", "Logprobs of the distribution that was sampled from can be returned."
    TOP_LOGPROBS = "top_logprobs", "The k most likely tokens at each step can be returned with their logprobs."
    PROMPT_LOGPROBS = "prompt_logprobs", "Logprobs of the prompt's own tokens can be returned."
    PROMPT_RANKS = "prompt_ranks", "Ranks of the prompt's own tokens, by likelihood, can be returned."
    SCORE_TOKENS = "score_tokens", "Given tokens can be scored without sampling any."
    SCORE_AT = (
        "score_at",
        "Given token ids can be scored at each of a sequence's last positions, at a temperature, as packed arrays.",
    )
    STOP_TOKEN_IDS = "stop_token_ids", "Generation can end at given token ids."
    STOP_STRINGS = "stop_strings", "Generation can end at given strings, also if they span tokens."
    STOP_REGEX = "stop_regex", "Generation can end at the first match of a regular expression."
    IGNORE_EOS = "ignore_eos", "Generation can continue past the end-of-sequence token."
    MIN_NEW_TOKENS = "min_new_tokens", "Stops can be suppressed until a minimum number of tokens is generated."
    TOP_K = "top_k", "Sampling can be limited to the k most likely tokens."
    TOP_P = "top_p", "Sampling can be limited to the most likely tokens that together have probability p."
    MIN_P = "min_p", "Sampling can be limited to tokens with at least a share of the most likely token's probability."
    REPETITION_PENALTY = "repetition_penalty", "Tokens of the prompt and output can be made less likely by a factor."
    FREQUENCY_PENALTY = "frequency_penalty", "Tokens can be made less likely each time they are generated."
    PRESENCE_PENALTY = "presence_penalty", "Tokens can be made less likely once they have been generated."
    LOGIT_BIAS = "logit_bias", "Values can be added to the logits of chosen tokens."
    SEED = "seed", "A request can have its own seed, which fixes its random stream whatever else is in the batch."
    PRIORITY = "priority", "Waiting requests with a higher priority are started sooner."
    DETERMINISTIC = "deterministic", "Results are bitwise the same, whatever else is in the batch."
    STRUCTURED_JSON = "structured_json", "Output can be constrained to a JSON schema."
    STRUCTURED_REGEX = "structured_regex", "Output can be constrained to a regular expression."
    STRUCTURED_EBNF = "structured_ebnf", "Output can be constrained to an EBNF grammar."
    LOGIT_PROCESSORS = "logit_processors", "An action mask, disallowed ids or a temperature schedule can be applied."
    HIDDEN_STATES = "hidden_states", "The last hidden states of the output tokens can be returned."
    ROUTED_EXPERTS = "routed_experts", "The experts that each token was routed to can be returned."
    PROMPT_ROUTED_EXPERTS = "prompt_routed_experts", "The experts of the prompt's tokens can be returned."
    SAMPLING_MASK = "sampling_mask", "The token ids that were left to draw each output token from can be returned."
    IMAGES = "images", "Prompts can contain images."
    VIDEO = "video", "Prompts can contain videos."
    AUDIO = "audio", "Prompts can contain audio."
    SESSIONS = "sessions", "Turns of a conversation can share the prefix cache under a session id."
    PREFIX_CACHE = "prefix_cache", "The KV cache of an earlier prompt is reused for a prompt with the same prefix."
    HICACHE_STORAGE = "hicache_storage", "The storage tier of a hierarchical cache can be cleared."
    # LoRA
    LORA = "lora", "LoRA adapters can be loaded, unloaded and chosen per request."
    # Pause, sleep, profile
    PAUSE_ABORT = "pause_abort", "Pausing can abort the requests in flight and return their tokens so far."
    PAUSE_WAIT = "pause_wait", "Pausing can wait until the requests in flight have ended."
    PAUSE_IN_PLACE = "pause_in_place", "Pausing can freeze the requests in flight and keep their KV cache."
    PAUSE_RETRACT = "pause_retract", "Pausing can freeze the requests in flight and release their KV cache."
    SLEEP_WEIGHTS = "sleep_weights", "The memory of the weights can be freed and allocated again."
    SLEEP_KV_CACHE = "sleep_kv_cache", "The memory of the KV cache can be freed and allocated again."
    SLEEP_CUDA_GRAPH = "sleep_cuda_graph", "The memory of CUDA graphs can be freed and allocated again."
    SLEEP_KEEPS_WEIGHTS = "sleep_keeps_weights", "Weights keep their values during sleep, without an update after it."
    PROFILE = "profile", "A profile can be recorded to a trace file."
    # Weights
    WEIGHTS_IN_PROCESS = "weights_in_process", "Weights can be loaded from tensors in the engine's own process."
    WEIGHTS_SHARED_MEMORY = "weights_shared_memory", "Weights can be loaded from another process's shared memory."
    WEIGHTS_CUDA_IPC = "weights_cuda_ipc", "Weights can be loaded from another process's GPU memory."
    WEIGHTS_BROADCAST = "weights_broadcast", "Weights can be loaded from a torch.distributed broadcast."
    WEIGHTS_DISK = "weights_disk", "Weights can be loaded from a checkpoint folder."
    WEIGHTS_PLUGIN = "weights_plugin", "Weights can be loaded through a plugin's transport, such as drivetrain's delta."
    WEIGHTS_LORA = "weights_lora", "A loaded LoRA adapter can be updated from a folder."
    WEIGHTS_LORA_TENSORS = (
        "weights_lora_tensors",
        "A LoRA adapter can be updated from tensors, by any claimed transport that brings weights from memory.",
    )
    WEIGHT_STAGING = "weight_staging", "Weights can be staged in the background while generation goes on."
    WEIGHT_UPDATE_IN_FLIGHT_IN_PLACE = (
        "weight_update_in_flight_in_place",
        "Weights can change while requests are frozen in flight and keep their KV cache.",
    )
    WEIGHT_UPDATE_IN_FLIGHT_RETRACT = (
        "weight_update_in_flight_retract",
        "Weights can change while requests are frozen in flight and their KV cache is released.",
    )
    VERSION_SPANS = "version_spans", "Each output reports the weight version of each of its tokens."
    READ_WEIGHTS = "read_weights", "A parameter can be read back by its checkpoint name."
    SAVE_SHARDED = "save_sharded", "The engine's weights can be saved to a local folder."
    SAVE_REMOTE = "save_remote", "The engine's weights can be saved to a remote URL."
    # Embedding and reward models
    EMBED = "embed", "Texts can be turned into embeddings."
    REWARD_SCORE = "reward_score", "Outputs can be scored with a reward model."
    # Models
    MOE = "moe", "Models with a mixture of experts can be served."
    # Parallelism
    TENSOR_PARALLEL = "tensor_parallel", "A model can be split by tensors over several devices."
    PIPELINE_PARALLEL = "pipeline_parallel", "A model can be split by layers over several devices."
    DATA_PARALLEL = "data_parallel", "One engine can hold several replicas of a model."
    EXPERT_PARALLEL = "expert_parallel", "A model's experts can be split over several devices."
