"""How a run is written down: its fields and presets, read strictly, with one sentence for each error."""
