"""What a peer does to the world: TLS, disk, the machine's clock, training, pages for its operator."""
