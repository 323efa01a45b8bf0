"""Engines drive Algorithm 1 for many simulated nodes: who answers the pull, and who lies, is decided here."""

from rpel.engine.local import Setting, Simulation
from rpel.engine.methods import METHODS

__all__ = ["METHODS", "Setting", "Simulation"]
