"""The vLLM backend: ``vllm.AsyncLLM`` in a host process, or a running vLLM server."""
