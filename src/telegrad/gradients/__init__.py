"""Gradients across workers. Knows torch's engine and the messages, and nothing of how messages travel."""
