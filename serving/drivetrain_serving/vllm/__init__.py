"""The routes of `vllm serve`, with its payloads, bodies and status codes."""
