"""Asynchronous GRPO."""
