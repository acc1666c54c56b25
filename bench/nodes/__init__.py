"""Several machines: a check before the training, a watch over it, and what they would reach.

doctor, watch and comm import nothing of the project: copied to a cluster by itself, this folder
runs them with torch alone, as `python -m nodes.doctor` in the folder that holds it.
"""
