"""Agents: episodes of many turns. A user's agent talks to an OpenAI-compatible endpoint, which keeps the tokens."""
