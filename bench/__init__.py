"""The harness: times every script of the ladder on this machine, and shows what it measured."""
