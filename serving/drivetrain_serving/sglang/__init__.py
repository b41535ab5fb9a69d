"""The routes of `sglang.launch_server`, with its payloads, bodies and status codes."""
