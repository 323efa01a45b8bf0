"""A peer on a real machine: the driver of the protocol, what it measures, and the pages of its operator."""
