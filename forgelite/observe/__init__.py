"""What a run writes and shows: metrics, rollouts, progress, reports; and waits that say what they wait for."""
