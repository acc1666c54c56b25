"""Tables, plots and the page of a result."""
