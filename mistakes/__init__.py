"""What goes wrong without each change of a diff: takes it back, runs that, and tells.

page            a page of docs/diffs/: the pieces of its diff, and the runs without them
trials          makes these runs, and those that they are compared with
verdicts        what a run shows: crash, hang, wrong numbers, nothing
outcomes        the verdicts on the page
found, ranks    what audit.py finds of them, and how it is run

The other modules are the commands.
"""
