"""The scripts stay comparable: what differs is the parallelism, and the diffs are on file."""

import ast
import re
from functools import cache

import pytest
from support import LADDER, ORACLE, ROOT, SCRIPTS
from update_golden import GOLDEN, golden

from bench.diffs import PAIRS, counts, diff

SECTIONS = [
    "# 0. device",
    "# 1. data",
    "# 2. model",
    "# 3. optimizer",
    "# 4. train",
    "# 5. evaluate",
    "# 6. finish",
]
# Of the functions and classes of a script: those that are not its parent's to the letter, and those
# that it adds (+). "the rest" is what stands outside of them, without the imports: who starts main.
CHANGED = {
    "snmc_dp.py": "main",
    "mnmc_ddp_launch.py": "main load_split +download_cifar10 evaluate +largest Meter "
    "parse_args run",
    "mnmc_ddp_mp.py": "main parse_args run the_rest",
    "mnmc_ddp_slurm.py": "main",
    "mnmc_apex.py": "main evaluate parse_args",
    "mnmc_horovod.py": "main evaluate largest Meter parse_args",
    "techniques/accelerate_ddp.py": "main",
    "techniques/activation_checkpointing.py": "main +blocks +keep_little +unchanged +bytes_of "
    "+of_each +Kept",
    "techniques/amp.py": "main parse_args",
    "techniques/channels_last.py": "main",
    "techniques/comm_hooks.py": "main +Traffic +own_hook +bf16_hook +powersgd_hook parse_args",
    "techniques/compile.py": "main",
    "techniques/elastic.py": "main +part_of_this_start +ResumableSampler +load_snapshot save "
    "parse_args",
    "techniques/invariant.py": "main +sum_in_order +digest evaluate Meter parse_args",
    "techniques/deepspeed_zero.py": "main evaluate parse_args",
    "techniques/fabric_ddp.py": "main",
    "techniques/grad_accum.py": "main parse_args",
    "techniques/local_sgd.py": "main evaluate +average_weights parse_args",
    "techniques/ring_allreduce.py": "main evaluate +ring_all_reduce +pass_on +average_gradients "
    "+compare_with_all_reduce parse_args",
    "techniques/syncbn.py": "main +AddUp +SyncBatchNorm +convert_sync_batchnorm evaluate",
    "techniques/custom_optimizer.py": "main +SharedLARS +cosine parse_args",
    "techniques/heterogeneous.py": "main +measure +gather +divide +UnevenSampler +share_list "
    "parse_args",
    "techniques/no_sync.py": "main parse_args",
    "techniques/distributed_eval.py": "main evaluate +totals +means_of_means",
    "techniques/uneven_inputs.py": "main +UnevenSampler +Answer evaluate parse_args",
    "techniques/fsdp.py": "main +blocks evaluate +bytes_of +of_each parse_args",
    "techniques/zero1.py": "main +bytes_of +of_each",
}
OURS = {"bench", "tests", "techniques", "support", *LADDER}
scripts = pytest.mark.parametrize("name", SCRIPTS)
LIMITS = {(old, new): (added, removed) for old, new, added, removed in PAIRS}
pairs = pytest.mark.parametrize("pair", LIMITS, ids="--".join)


def text(name: str) -> str:
    return (ROOT / name).read_text()


@cache
def functions(source: str) -> dict[str, str]:
    """The text of each of its functions and classes, and of the rest of its statements."""
    parts, rest, lines = {}, [], source.splitlines()
    for node in ast.parse(source).body[1:]:  # the first one is its docstring
        name, decorators = getattr(node, "name", ""), getattr(node, "decorator_list", [])
        first = min(part.lineno for part in (node, *decorators))
        code = "\n".join(lines[first - 1 : node.end_lineno])
        if name:
            parts[name] = code
        elif not isinstance(node, ast.Import | ast.ImportFrom | ast.Try):  # a try of an import
            rest.append(code)
    return parts | {"the_rest": "\n".join(rest)}


def imports(source: str) -> set[str]:
    """The first words of all that it imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "."}
    return {name.split(".")[0] for name in names}


def test_every_script_has_a_parent():
    assert sorted(new for _, new in LIMITS) == sorted(CHANGED)
    assert sorted(CHANGED) == sorted(set(SCRIPTS) - {"snsc.py"})


@pairs
def test_golden_diff(pair):
    """A change of the ladder shows in its diffs: `python tests/update_golden.py`, and look."""
    assert golden(*pair).read_text() == diff(*pair)


def test_no_golden_diff_is_left_over():
    left = {file.name for file in GOLDEN.glob("*.diff")}
    assert left == {golden(*pair).name for pair in LIMITS}


@pairs
def test_lines_changed(pair):
    """A rung costs the reader this many lines, and no more."""
    (added, removed), (most_added, most_removed) = counts(diff(*pair)), LIMITS[pair]
    assert 0 < added <= most_added and 0 < removed <= most_removed


@pairs
def test_a_diff_turns_the_old_script_into_the_new_one(pair):
    """What stands behind the signs, and nothing else, is the difference: `diff -u`, complete."""
    old, new = (text(name).splitlines() for name in pair)
    lines = diff(*pair).splitlines()
    assert lines[:2] == [f"--- {pair[0]}", f"+++ {pair[1]}"]
    place, made = 0, []
    for line in lines[2:]:
        if line.startswith("@@"):
            first = int(re.match(r"@@ -(\d+)", line)[1]) - 1
            made += old[place:first]
            place = first
        else:
            if line[0] != "+":
                assert old[place] == line[1:]
                place += 1
            if line[0] != "-":
                made.append(line[1:])
    assert made + old[place:] == new


@pairs
def test_functions_that_the_parallelism_does_not_touch_are_equal_to_the_letter(pair):
    """All of them, in the same order; those that differ or are new are listed by name."""
    old, new = (functions(text(name)) for name in pair)
    assert not old.keys() - new.keys()
    assert [name for name in new if name in old] == [*old]
    changed = {name for name in old if old[name] != new[name]}
    changed |= {f"+{name}" for name in new.keys() - old.keys()}
    assert changed == set(CHANGED[pair[1]].split())


def flags(function: str) -> dict[str, str]:
    """The lines of parse_args that add a flag, by its name, without their help."""
    lines = re.findall(r'^    add\("(--[\w-]+)"(.*)\)$', function, flags=re.M)
    return {name: re.sub(r', help="[^"]*"', "", rest) for name, rest in lines}


@pairs
def test_a_script_has_its_parents_flags_and_then_its_own(pair):
    """The same types, choices and defaults, and nothing that is said of its parent's flags changes;
    but two flags need other words where processes work together.
    """
    old, new = (functions(text(name))["parse_args"] for name in pair)
    before, after = flags(old), flags(new)
    assert len(before) >= 14
    assert [*after.items()][: len(before)] == [*before.items()]
    theirs, ours = old.splitlines(), new.splitlines()
    gone = [line for line in theirs if line not in ours]
    assert all(re.match(r'    add\("--(batch-size|workers)"', line) for line in gone)
    assert [line for line in ours if line in theirs] == [x for x in theirs if x in ours]
    for line in ours:
        if line not in theirs and not re.match(r'    add\("--', line):
            named = {f"--{name.replace('_', '-')}" for name in re.findall(r"args\.(\w+)", line)}
            assert not named & before.keys(), line


@scripts
def test_sections(name):
    """Each heading once, in order, so that the same number is the same thing in every file."""
    found = [line.strip() for line in text(name).splitlines() if re.match(r"\s*# \d", line)]
    assert found == SECTIONS


@pytest.mark.parametrize("name", ["snsc.py", "snmc_dp.py", "techniques/grad_accum.py"])
def test_a_plain_script_says_nothing_of_processes_that_work_together(name):
    """Who reads it first needs none of it. Its docstring names the script to be read next."""
    source = text(name).replace("mnmc_ddp_launch.py", "", 1).lower()
    assert not re.search(r"rank|process.group|world|\bdist|torchrun|ddp|gloo|nccl", source)
    assert not imports(source) & {"fcntl", "socket", "subprocess"}


@scripts
def test_a_script_stands_alone(name):
    """Copied into another project, it works: nothing of ours is imported."""
    assert not imports(text(name)) & OURS


def test_the_harness_imports_no_script():
    """What times a script cannot change it."""
    for file in (ROOT / "bench").rglob("*.py"):
        assert not imports(file.read_text()) & {*LADDER, "techniques", "tests"}, file


def test_the_oracle_shares_no_function_with_a_script():
    """Else a mistake in both would be none."""
    ours = set(functions(text(ORACLE)).values())
    for name in SCRIPTS:
        assert ours & set(functions(text(name)).values()) <= {functions(text(name))["the_rest"]}
    assert not imports(text(ORACLE)) & OURS
