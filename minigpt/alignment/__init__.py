"""Preferences, rewards and policy gradients: what comes after instruction tuning."""
