"""Front-ends: processes that answer a server's requests to generate, all over the engine of one owner."""
