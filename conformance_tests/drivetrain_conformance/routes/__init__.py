"""Route-level conformance: small requests to any running server, and what trainers read of its answers."""
