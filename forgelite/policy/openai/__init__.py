"""An OpenAI-compatible endpoint in front of the policy, which records every session token by token for training."""
