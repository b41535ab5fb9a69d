#!/usr/bin/env bash
# The conformance suite on SGLang and a GPU, in shards beside each other: most of each is engines that start.
#
#     benchmarks/gpu/sglang_conformance.sh FOLDER      # whole.json, and a report and a log of each shard
#
# Wants 16 cores and a GPU of 80 GB or more; two GPUs for what needs two ranks. What measures memory runs alone.
set -u
folder=$(realpath -m "$1")
mkdir -p "$folder"
# SGLang takes what others hold of the GPU for its own, and for an imbalance between two.
export SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=4
kernels='sampling_backend: pytorch, mm_attention_backend: triton_attn'
quick='disable_prefill_cuda_graph: true, cuda_graph_bs_decode: [1, 2, 4, 8, 16]'
small='max_total_tokens: 60000'
states='enable_return_hidden_states: true'

cases() { # pattern: ids of the cases that match it, as arguments
	drivetrain conformance --list --json | python -c '
import json, re, sys
print(*(f"--case {case}" for case in (item["case"] for item in json.load(sys.stdin)["cases"]) if re.search(sys.argv[1], case)))
' "$1"
}

shard() { # name, pattern, engine_kwargs
	# shellcheck disable=SC2046
	drivetrain conformance sglang --dtype bfloat16 --set attention_backend=triton --set gpu_memory_utilization=0.3 \
		--set "engine_kwargs={$3}" --report "$folder/$1.json" $(cases "$2") >"$folder/$1.log" 2>&1
	tail -n 1 "$folder/$1.log"
}

memory='sleep/(the_memory|memory_is|kept_weights_give|cycles)|weight_sync/many_pushes'
usual="$kernels, $quick, $small, $states"
shard faults '^faults/' "$usual" &
shard lifecycle '^lifecycle/' "$usual" &
shard lora '^(lora|errors)/|^openai/lora' "$usual" &
shard answers '^(generate|stop|logprob|streaming|structured_output|abort|pause|histories)/' "$usual" &
shard weights '^weight_sync/(?!many_pushes|.*expert|.*mixture)' "$usual" &
shard sleep '^sleep/(?!the_memory|memory_is|kept_weights_give|cycles)' "$usual" &
shard rest '^(sampling|sessions|embeddings|score)/|^openai/[^l]|^weight_sync/.*(expert|mixture)' "$usual" &
shard images '^multimodal/' "$usual" &
shard parallel '^parallel/' "$usual" &
shard experts '^hidden_states/.*expert' "$kernels, $quick, $small, enable_return_routed_experts: true" &
shard states '^hidden_states/(?!.*expert)' "$usual" &
shard storage '^sessions/.*storage' "$kernels, $quick, enable_hierarchical_cache: true, hicache_storage_backend: file" &
wait
shard memory "$memory" "$kernels, $quick"
drivetrain combine "$folder"/*.json --output "$folder/whole.json"
