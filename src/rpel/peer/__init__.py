"""A real peer: the same Algorithm 1, with pulls over mutually authenticated TLS. docs/architecture.md,
"Real peers"."""
