"""Measurements against a limit or a peer in the same run. Each module is a program: `python -m benchmarks.grpo`."""
