"""Several machines: a check before the training, and the speed of their network.

This folder imports nothing of the project: copied to a cluster by itself, it runs with torch alone,
as `python -m nodes.preflight` and `python -m nodes.comm` in the folder that holds it.
"""
