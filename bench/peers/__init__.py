"""The comparison with the ancestors' training loops, and the overhead of ours: one command."""

from bench.peers.command import main

__all__ = ["main"]
