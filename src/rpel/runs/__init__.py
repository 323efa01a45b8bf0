"""What a run leaves behind: its folder, its columns of numbers, its certificate,
and the record that reads them."""
