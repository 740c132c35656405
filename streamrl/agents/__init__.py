"""Agents: episodes of many turns. The user's agent talks to an OpenAI-compatible endpoint; the tokens stay on our side."""
