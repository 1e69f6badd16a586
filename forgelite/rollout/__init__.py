"""Prompts become trajectories: the dataset, the environments, the turns, the groups."""
