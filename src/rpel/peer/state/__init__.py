"""What a peer has on disk: its half-steps, where each round ended, its log, and memberships."""
