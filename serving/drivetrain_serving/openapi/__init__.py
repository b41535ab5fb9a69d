"""The OpenAPI document of the server's routes."""
