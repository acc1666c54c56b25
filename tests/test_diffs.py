"""The scripts stay comparable: they differ only in the parallelism."""

import ast
import re
from functools import cache

import pytest
from support import LADDER, ORACLE, ROOT, SCRIPTS

from bench.ladder import PAIRS
from bench.ladder import SCRIPTS as KNOWN

SECTIONS = [
    "# 0. ",  # device, or processes and devices
    "# 1. data",
    "# 2. model",
    "# 3. optimizer",
    "# 4. resume",
    "# 5. train",
    "# 6. evaluate",
    "# 7. finish",
]
OURS = {"bench", "tests", "techniques", "support", *LADDER}
scripts = pytest.mark.parametrize("name", SCRIPTS)
pairs = pytest.mark.parametrize("pair", PAIRS, ids="--".join)


def text(name: str) -> str:
    return (ROOT / name).read_text()


@cache
def functions(source: str) -> dict[str, str]:
    """The text of each function and class, and of the rest of the statements."""
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
    """The first words of the names of all imported modules, also inside of functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "."}
    return {name.split(".")[0] for name in names}


def test_every_script_has_a_parent():
    """And an entry in the registry: the ladder's, and all of techniques/ that train."""
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("techniques/*.py")}
    files |= {f"{name}.py" for name in LADDER}
    assert {new for _, new in PAIRS} == files - {"snsc.py", "techniques/collectives.py"}
    assert {old for old, _ in PAIRS} <= {*SCRIPTS}


def test_scripts_are_short():
    """Ten minutes to read."""
    assert max(len(text(name).splitlines()) for name in SCRIPTS) <= 440


@pairs
def test_functions_that_the_parallelism_does_not_touch_are_equal_to_the_letter(pair):
    """In the same order. bench/ladder.py lists those that differ, are new, or are dropped."""
    old, new = (functions(text(name)) for name in pair)
    assert [name for name in new if name in old] == [name for name in old if name in new]
    changed = {name for name in old if old[name] != new.get(name, old[name])}
    changed |= {f"+{name}" for name in new.keys() - old.keys()}
    changed |= {f"-{name}" for name in old.keys() - new.keys()}
    assert changed == set(KNOWN[pair[1]].functions.split())


def flags(function: str) -> dict[str, tuple[dict, str]]:
    """The flags that parse_args adds: for each its settings, and its help."""
    found = {}
    for node in ast.walk(ast.parse(function)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "add":
            settings = {word.arg: ast.unparse(word.value) for word in node.keywords}
            text = settings.pop("help")
            found[ast.literal_eval(node.args[0])] = settings, text
    return found


@pairs
def test_a_script_has_its_parents_flags_and_then_its_own(pair):
    """The same types, choices and defaults. bench/ladder.py lists those with another help."""
    before, after = (flags(functions(text(name))["parse_args"]) for name in pair)
    for name in KNOWN[pair[1]].drops:
        del before[name]
    assert len(before) >= 13 and [*after][: len(before)] == [*before]
    assert {name: after[name][0] for name in before} == {name: before[name][0] for name in before}
    other = {name for name in before if after[name][1] != before[name][1]}
    assert other == set(KNOWN[pair[1]].helps)


@scripts
def test_sections(name):
    """Each heading once, in order: the same number is the same part in every file."""
    found = [line.strip() for line in text(name).splitlines() if re.match(r"\s*# \d", line)]
    assert [line[: len(start)] for line, start in zip(found, SECTIONS, strict=True)] == SECTIONS


@pytest.mark.parametrize("name", [name for name in SCRIPTS if not KNOWN[name].processes])
def test_a_plain_script_says_nothing_of_processes_that_work_together(name):
    """Readers begin with it. Its docstring may name the script to be read next."""
    source = text(name).split('"""', 2)[2].lower()
    assert not re.search(r"rank|process.group|world|\bdist|torchrun|ddp|gloo|nccl|environ", source)
    assert not imports(source) & {"socket", "subprocess"}


@scripts
def test_a_script_stands_alone(name):
    """It works in another project: it imports nothing of ours."""
    assert not imports(text(name)) & OURS


def test_the_harness_imports_no_script():
    """The harness starts scripts, and cannot change them by importing them."""
    for file in (ROOT / "bench").rglob("*.py"):
        assert not imports(file.read_text()) & {*LADDER, "techniques", "tests"}, file


def test_the_oracle_shares_no_function_with_a_script():
    """A mistake in a shared function would be in both, and not be found."""
    ours = set(functions(text(ORACLE)).values())
    for name in SCRIPTS:
        assert ours & set(functions(text(name)).values()) <= {functions(text(name))["the_rest"]}
    assert not imports(text(ORACLE)) & OURS


@scripts
def test_a_model_that_is_nan_has_no_accuracy(name):
    """argmax() of NaN logits is the place of the NaN: some class, and sometimes the right one."""
    assert '"accuracy": (correct + 0 * loss) / images' in functions(text(name))["Meter"]
