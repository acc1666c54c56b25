"""Shows a result: tables, plots and a page."""
