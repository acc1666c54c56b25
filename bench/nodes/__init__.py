"""Several machines: a check before the training, and a watch over it.

This folder imports nothing of the project: copied to a cluster by itself, it runs with torch alone,
as `python -m nodes.doctor` and `python -m nodes.watch` in the folder that holds it.
"""
