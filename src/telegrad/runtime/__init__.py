"""How a worker waits, reads, calls and serves."""
