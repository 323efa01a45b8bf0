"""The network of a peer: TLS, HTTP, and both of its ends."""
