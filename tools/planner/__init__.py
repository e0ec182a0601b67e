"""Predicts the seconds of an RL step by phase from recorded runs: `tlt plan CONFIG.yaml --ranks N
--simulate RUN`.
"""
