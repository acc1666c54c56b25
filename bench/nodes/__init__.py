"""Several machines: a check before the training.

This folder imports nothing of the project: copied to a cluster by itself, it runs with torch alone,
as `python -m nodes.preflight` in the folder that holds it.
"""
