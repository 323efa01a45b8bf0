"""How long a test waits for what must happen."""

PATIENCE = 600.0
"""Seconds: not what anything may take, but after how long it is said to hang, on the most loaded machine."""
