"""What a peer decides: pure, without sockets, files, threads or a clock of its own."""
