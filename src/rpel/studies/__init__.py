"""Studies: labelled runs, their table and their figures; sweeps, the arena, the paper's panels, reports."""
