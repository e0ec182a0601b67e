"""Prompts become scored responses: rounds, conversations, batch rules, evaluation, logs."""
