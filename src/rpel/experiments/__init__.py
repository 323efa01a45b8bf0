"""Experiments: what a run is (spec), how it is run, kept and continued (run, folder), and what it shows (result)."""
