"""Read what a run leaves behind: its folder, its columns of numbers and its certificate."""
