"""What a network and its members write down: members.toml, its timetable, and each peer's peer.toml."""
