"""Networks of real peers as their operators see them: founding one, checking it, watching it,
showing it off."""
