"""Runs and times the cases."""
