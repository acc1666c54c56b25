"""What is running, while it runs."""

import sys


class Progress:
    """What is running: a bar on a terminal, else a line a launch."""

    def __init__(self, plan):
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}")
        self.bar = Bar(*columns, console=console, transient=True, refresh_per_second=2)
        self.terminal, self.total, self.turns = console.is_terminal, plan.rounds, plan.precise
        self.task = self.bar.add_task("set-up", total=self.total, left="")

    def __enter__(self):
        if self.terminal:
            self.bar.start()
        return self

    def __exit__(self, *_):
        self.bar.stop()

    def __call__(self, text: str, number: int = 1, share: float = 0.0, left: float | None = None):
        """text: which case and round; left: seconds of the budget."""
        rest = "" if left is None else f"{max(0, left) / 60:.1f} min left"
        done = number - 1 + share
        if not self.terminal and (self.turns and share):
            return  # a line a round is enough where a turn takes a second
        if self.terminal:
            self.bar.update(self.task, description=text, completed=done, left=rest)
        else:
            print(f"{text}, {rest}" if rest else text, file=sys.stderr, flush=True)
