"""Writes the generated parts of the pages, the pictures, and the site."""
