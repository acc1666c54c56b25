"""Measurements of their own, beside the table of cases."""
