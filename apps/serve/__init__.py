"""A policy behind an OpenAI-compatible endpoint."""
