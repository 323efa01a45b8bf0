"""Algorithm 1 among simulated nodes: who answers the pull and who lies; a run, its folder and its result."""
