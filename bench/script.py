"""What bench/ladder.py says of a script, and of a row of the tables of techniques."""

from dataclasses import dataclass, field

DDP = "mnmc_ddp_launch.py"  # what most techniques are read beside


@dataclass(frozen=True)
class Timed:
    """How `bench run --techniques` times a technique, and what its gate compares.

    arithmetic: what its gate computes in, "" for the case's own: "double" if other kernels or
    another order of sums round in other ways, "lossy" if it compresses gradients.
    on_gpus: the same on GPUs, if it differs there.
    gate: flags in its gate instead of `flags`, if with those it trains other numbers by design;
    EQUAL among them stands for equal shares of the batch.
    exact: flags of the oracle in its gate, after the others.
    period: steps after which its work repeats; windows are whole periods.
    """

    group: str
    flags: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    arithmetic: str = ""
    on_gpus: str = ""
    gate: tuple[str, ...] | None = None
    exact: tuple[str, ...] = ()
    period: int = 1


@dataclass(frozen=True)
class Script:
    """A script, and how it differs from the one that it is read beside.

    functions: those unlike its parent's, new ones (+), dropped ones (-), in the script's order.
    "the_rest" is what stands outside of them, without the imports: it starts main().
    split: how it splits the global batch: the oracle's --split.
    library: what it imports beside torch and torchvision.
    timed: its rows in the table of techniques, by name.
    arch: a model that it trains, if it does not train every classifier.
    ranks: the processes of its trials for docs/diffs/: the fewest that show what it does.
    oracle: flags of the oracle in these trials, after --parts with the ranks, and --split.
    equality: flags with which it trains an epoch that is the oracle's bit for bit; None if another
    test states how near it comes.
    helps: its parent's flags whose help it changes; drops: those that it lacks.
    pretended: whether it runs on the pretended GPUs of tests/pretend.
    """

    path: str
    parent: str = DDP
    functions: str = ""
    launcher: str = "torchrun"  # or python, srun, horovodrun; oneflow, which runs without torch
    processes: bool = True  # whether there are several
    split: str = "strided"
    library: str = ""
    adds: str = ""  # what it is, in the README's words; of a technique its docstring says it
    timed: dict[str, Timed] = field(default_factory=dict)
    arch: str = ""
    ranks: int = 2
    oracle: tuple[str, ...] = ()
    equality: tuple[str, ...] | None = None
    helps: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    pretended: bool = True

    @property
    def in_oneflow(self) -> bool:
        """Whether it runs in OneFlow's environment, which has no torch."""
        return self.launcher == "oneflow"
