"""What goes wrong without each change of a diff: takes it back, runs that, and tells."""
