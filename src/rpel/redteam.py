"""A hostile member for drills on one's own network: the attacks of the library on a real peer's wire."""
