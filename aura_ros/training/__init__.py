"""Training of memories: recall tasks, objectives, the chunked scan. Importing this package imports no torch."""
