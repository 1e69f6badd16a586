"""Trajectories get numbers: rewards, reference log-probabilities, advantages."""
