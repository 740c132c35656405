"""Environments of agents: each in a virtual environment and in processes of its own, spoken to over their pipes."""
