"""Experiments: the panels of the paper and beyond it, reproduced at some scale; sweeps;
the fixed-graph baseline."""
