"""Sandbox states that are kept: what they are, which are worth keeping, and where they lie."""
