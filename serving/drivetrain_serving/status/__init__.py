"""The status page, and the facts that it shows."""
