"""Checks before a run starts: command line, nodes, memory."""
