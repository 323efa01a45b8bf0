"""What a peer does between two exchanges: a local step on its own data, private if it is asked to be."""
