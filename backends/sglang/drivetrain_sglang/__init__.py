"""The SGLang backend: ``sglang.Engine`` in a host process, or a running SGLang server."""
