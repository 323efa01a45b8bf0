"""Run a real peer: the same Algorithm 1, with pulls over mutually authenticated TLS.

See docs/architecture.md, "Real peers".
"""
