"""Shows what is running."""

import sys


class Progress:
    """What is running: a bar of the time on a terminal, else a line each."""

    def __init__(self, plan):
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}")
        self.bar = Bar(*columns, console=console, transient=True, refresh_per_second=2)
        self.terminal, self.budget = console.is_terminal, plan.budget
        self.task = self.bar.add_task("set-up", total=self.budget, left="")

    def __enter__(self):
        if self.terminal:
            self.bar.start()
        return self

    def __exit__(self, *_):
        self.bar.stop()

    def __call__(self, text: str, left: float | None = None, often: bool = False):
        """text: which case does what; left: seconds of the budget; often: only for the bar."""
        rest = "" if left is None else f"{max(0, left) / 60:.1f} min left"
        if self.terminal:
            done = {} if left is None else {"completed": self.budget - max(0, left)}
            self.bar.update(self.task, description=text, left=rest, **done)
        elif not often:  # one write, so that lines of two threads do not run together
            sys.stderr.write(f"{text}, {rest}\n" if rest else f"{text}\n")
            sys.stderr.flush()
