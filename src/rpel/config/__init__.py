"""What people write down: run files, members.toml, peer.toml; read strictly,
each fault said in one sentence."""
