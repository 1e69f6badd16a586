"""Optimizer steps on torchtitan models: the only place where weights change and versions are counted."""
