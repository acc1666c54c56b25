"""README.md and docs/: short, not too wide, links that lead somewhere, and nothing out of date."""

import argparse
import json
import re
import shlex
from statistics import median

import made_up
import pytest
from support import GATED, ROOT, SCRIPTS

from bench.ladder import in_group
from bench.options import add_flags
from bench.show import table
from bench.show.summary import Run, timed
from docs.make import logs, readme, tables
from docs.make.__main__ import main, render

README = ROOT / "README.md"
START = ROOT / "docs" / "howto" / "start.md"
CHINESE = ROOT / "README.zh-CN.md"
PAGES = [README, CHINESE, ROOT / "CONTRIBUTING.md", ROOT / "data" / "README.md"]
PAGES += [ROOT / "techniques" / "README.md", *ROOT.glob("docs/**/*.md")]
LINES, WIDTH = 140, 100
TEST = "bash tests/run_all.sh"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)


def named(path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """A page without its code, where brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def commands() -> list[str]:
    """The lines of the code blocks of the README and of the page to start with."""
    text = (README.read_text() + START.read_text()).replace("\\\n", "")
    blocks = "".join(code for kind, code in FENCE.findall(text) if kind == "bash")
    lines = (" ".join(shlex.split(line, comments=True)) for line in blocks.splitlines())
    return [line for line in lines if line]


def links(text: str) -> list[str]:
    """Where a page leads: [text](here), [text]: here, and src="here"."""
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    return found + re.findall(r"^\[[^]]+\]: (\S+)$", text, flags=re.M)


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", text), flags=re.M)
    words = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).strip().lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in words}


def facts(text: str) -> list[dict[str, list[str]]]:
    """What a section of the README says in any language: its commands, code, links and figures."""
    found = []
    for section in re.sub(r"<!-- .*? -->|(?<=alt=)\"[^\"]*\"", "", text).split("\n## "):
        plain = FENCE.sub("", section)
        code = "".join(code for _, code in FENCE.findall(section)).replace("\\\n", "")
        lines = [shlex.split(line, comments=True) for line in code.splitlines()]
        known = {"commands": lines, "code": re.findall(r"`[^`\n]+`", plain)}
        known["links"] = [x for x in links(plain) if x not in ("README.md", CHINESE.name)]
        known["figures"] = re.findall(r"\d+(?:[.,]\d+)*", section)
        found.append({kind: sorted(values) for kind, values in known.items()})
    return found


def test_the_chinese_readme_says_the_same():
    """Section by section. After a change of README.md, README.zh-CN.md is changed by hand."""
    english, chinese = (facts(path.read_text()) for path in (README, CHINESE))
    assert len(english) == len(chinese) > 5
    for one, other in zip(english, chinese, strict=True):
        for kind, values in one.items():
            found = [x for x in other[kind] if x not in values]
            assert other[kind] == values, f"{kind} only in {CHINESE.name}: {found}"


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= LINES


def test_the_method_fits_on_a_page():
    assert len((ROOT / "docs" / "evidence" / "method.md").read_text().splitlines()) <= 110


def test_the_index_leads_to_every_page():
    """All but the diffs, which their scripts' pages and the list of techniques lead to."""
    index = ROOT / "docs" / "README.md"
    found = {(index.parent / link.partition("#")[0]).resolve() for link in links(index.read_text())}
    pages = {page for page in PAGES if ROOT / "docs" in page.parents and page != index}
    assert {page for page in pages if page.parent.name != "diffs"} <= found


def test_the_glossary_is_in_order():
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    terms = re.findall(r"^\| ([^|]+?) \|", text, flags=re.M)[2:]
    assert len(terms) > 30 and terms == sorted(terms, key=lambda term: term.lower())


def test_no_code_of_the_readme_is_too_wide():
    lines = [line for _, code in FENCE.findall(README.read_text()) for line in code.splitlines()]
    assert lines and not [line for line in lines if len(line) > WIDTH]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_somewhere(page):
    """And every [text][name] is defined."""
    text = prose(page.read_text())
    wrong = []
    for link in links(text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or ROOT not in [path, *path.parents]:
            wrong.append(link)
        elif anchor and anchor not in anchors(path.read_text()):
            wrong.append(link)
    assert not wrong
    defined = set(re.findall(r"^\[([^]]+)\]: ", text, flags=re.M))
    assert set(re.findall(r"\]\[([^]]+)\]", text)) <= defined


def test_the_generated_parts_are_current(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_a_missing_part_is_an_error():
    text = re.sub("<!-- begin .*? -->", "", README.read_text(), count=1)
    with pytest.raises(ValueError, match="must have one"):
        render("README.md", text)


def test_every_command_names_a_file_that_is_there():
    """Those that name a script or a file of ours, which all but git's do."""
    own = re.compile(r"[\w./-]+\.(?:py|sh|sbatch)$")
    for command in commands():
        names = [word for word in command.split() if own.match(word)]
        assert all((ROOT / name).is_file() for name in names), command
        assert names or command == ". .venv/bin/activate", command


def test_the_readme_shows_every_script_of_the_ladder():
    """And what a script's docstring says it is started by. The page on techniques has theirs."""
    shown = commands()
    techniques = ROOT / "techniques" / "README.md"
    assert "techniques/README.md" in links(README.read_text())
    pages = {f"../docs/diffs/{path.stem}.md" for path in techniques.parent.glob("*.py")}
    assert pages <= set(links(techniques.read_text()))
    for script in SCRIPTS:
        if not script.startswith("techniques/"):
            first = (ROOT / script).read_text().splitlines()[2]
            assert first in shown, script


def test_the_test_command_is_the_one_that_ci_runs():
    assert TEST in commands() and f"{TEST} --full --install" in commands()
    (line,) = [x for x in (ROOT / ".ci" / "run").read_text().splitlines() if x.startswith("exec ")]
    assert line.removeprefix("exec ").startswith(f"{TEST} --full ")


def flags(name: str) -> set[str]:
    """The flags that a Python file adds to its parser."""
    return set(re.findall(r'add\(\s*"(--[\w-]+)"', (ROOT / name).read_text()))


def explained() -> set[str]:
    """The flags that have a row in docs/reference/flags.md."""
    text = (ROOT / "docs" / "reference" / "flags.md").read_text()
    return set(re.findall(r"^\|.*?`(--[\w-]+)` \|", text, flags=re.M))


def test_the_flags_of_the_scripts_are_explained_and_no_others():
    assert explained() == set().union(*map(flags, SCRIPTS))


def test_every_flag_of_the_benchmark_is_explained():
    text = (ROOT / "docs" / "reference" / "benchmark.md").read_text()
    (run,) = re.findall("^## Flags$(.*?)^## ", text, flags=re.M | re.S)
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    assert set(re.findall(r"`(--[\w-]+)`[,| ]", run)) >= {*parser._option_string_actions}
    assert flags("bench/__main__.py") <= set(re.findall(r"`(--[\w-]+)`", text))


def test_a_users_own_runs_are_not_published(tmp_path, monkeypatch):
    """What git does not keep would make the pages differ from one checkout to the next."""
    for folder in ("machine/bench", "runs/bench"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "table.csv").touch()
    monkeypatch.setattr(logs, "LOGS", tmp_path)
    assert logs.logged("*/bench/table.csv") == [tmp_path / "machine/bench/table.csv"]


# --- results in logs/ that we do not have: of made-up machines


def part(name: str, page: str = "") -> str:
    """What logs/ makes of a part: its name, and the end of its page's."""
    pages = [x for x in tables.PARTS if x.name == name and x.page.endswith(f"{page}.md")]
    return "\n\n".join(filter(None, (x.text() for x in pages)))


H100, CPU = ["NVIDIA H100 80GB HBM3"], []


@pytest.fixture
def add(tmp_path, monkeypatch):
    """Adds a made-up result to logs/, which is empty at first: add("machine/bench", GPUs, ...)."""
    monkeypatch.setattr(logs, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(tables, "read_run", Run.of)  # some tests write a result anew

    def result(name, gpus, blocks=2, sizes=(1,), **more):
        folder = tmp_path / "logs" / name
        flops = {"flops_per_image": 3e8} if gpus else {}
        rates = {"snsc.py": 30_000 if gpus else 700, "mnmc_horovod.py": 400}
        made_up.run(folder, rates, blocks, gpus=gpus, sizes=list(sizes), **flops | more)
        table.write(Run.of(folder))
        (folder / "throughput.png").touch()
        return folder

    return result


def test_a_result_on_gpus_comes_first_and_a_cpus_second(add):
    """However new they are; only the first has a picture, only GPUs have MFU."""
    cpu = add("cpu/bench", CPU, when=2e9)
    add("cpu/bench-2048", CPU, when=3e9)
    alone = readme.result()
    add("h100-old/bench", H100, when=1e9)
    new = add("h100/bench", H100, blocks=6, when=1.1e9)
    add("h100/bench-2048", H100, when=1.2e9, batch_size=2048)
    text = readme.result()
    first, second = text.split("\n\n**Without a GPU**:\n\n")
    assert first.startswith('<img src="logs/h100/bench/throughput.png"')
    table, about = readme.shown(Run.of(new))
    head, _, plain, again = table.splitlines()[:4]
    assert head.endswith(" | speed-up | efficiency | MFU |")
    mfu = plain.removesuffix("% |").split(" | ")[-1]
    assert "baseline" in plain
    assert 6 < float(mfu) < 30  # 30,000 x 0.3 GFLOP of 67 TFLOP/s would be 13
    assert "[" in again and table in first and about in first and "1 x NVIDIA H100" in about
    assert "MFU" not in second and "2 cores of a CPU" in second and text.count("<img") == 1
    assert "\n\n".join(readme.shown(Run.of(cpu))) == second and second in alone


def test_which_machines_have_results(add):
    for name in ("bench", "bench-2048", "techniques-224"):
        add(f"h100/{name}", H100)
    add("2-cores-x/techniques", CPU)
    text, gpu = " ".join(readme.measured().split()), "1 x NVIDIA H100 80GB HBM3"
    assert f"are from: {gpu}; 2 cores of a CPU." in text


def test_the_readme_says_what_was_timed_on_gpus():
    text = " ".join(README.read_text().split())
    claim = "The scripts' speeds are from CPUs" in text
    assert claim == (not any(run.gpus for run in logs.runs("*")))
    lines = logs.lines_of(logs.LOGS / "1-h200-torch2.11" / "throughput.jsonl")
    way = ("resnet50:224:256", "bf16+channels_last+compile")
    speeds = [line["images_per_second"] for line in lines if (line["size"], line["way"]) == way]
    assert f"trains [{median(speeds):,.0f} images/s]" in text


def test_costs_have_a_table_for_each_result(add):
    """GPUs first, and each against DDP of as many processes."""
    add("2-cores-x/techniques", CPU, cases=made_up.techniques(2, "bf16"))
    add("h100/techniques", H100, cases=made_up.techniques(1, "bf16"))
    add("h100/techniques-fp16", H100, cases=made_up.techniques(1, "fp16"))
    add("h100/techniques-memory", H100, cases=made_up.techniques(1, "zero1"))
    more = {"cases": made_up.techniques(1, "bf16"), "batch_size": 2048}
    add("h100/techniques-2048", H100, **more)
    heads = []
    for result in part("costs", "speed").split("resnet18 on made-up images, ")[1:]:
        title, rows = result.split(":\n\n")
        _, first, *names = re.findall(r"^\| (\w+) \|", rows, re.M)
        assert first == "DDP"
        (world,) = set(re.findall(r"relative to (DDP on \d ranks?)", rows))
        heads.append((title.split("; torch")[0], world, names))
    gpu = "1 x NVIDIA H100 80GB HBM3"
    assert heads == [
        (f"global batch 256; {gpu}", "DDP on 1 rank", ["bf16"]),
        (f"global batch 2048; {gpu}", "DDP on 1 rank", ["bf16"]),
        (f"global batch 256; {gpu}", "DDP on 1 rank", ["fp16"]),
        ("global batch 256; 2 cores of a CPU", "DDP on 2 ranks", ["bf16"]),
    ]
    assert "| zero1 |" in part("costs", "memory") and "bf16" not in part("costs", "memory")


def test_every_technique_in_logs_is_in_a_table_of_costs():
    """Also one that was renamed since, or that changed its group."""
    pages = {x.page for x in tables.PARTS if x.files == tables.TIMED}
    shown = "".join((ROOT / page).read_text() for page in pages)
    for run in logs.runs("techniques*"):
        for row in timed(run.rows):
            assert f"| {row['technique']} |" in shown or not row["technique"]


def test_every_group_has_a_page(add):
    """With its costs; techniques/README.md names both."""
    text = (ROOT / "techniques" / "README.md").read_text()
    for group in GATED:
        add("h100/techniques", H100, cases=made_up.techniques(1, next(iter(in_group(group)))))
        shown = [x.page for x in tables.PARTS if x.files == tables.TIMED and x.text()]
        assert len(shown) == 1, group
        assert re.search(rf"\(../{shown[0]}\) \| `{group}`", text), group


def test_where_ddp_has_no_speed_there_is_no_table(add):
    folder = add("h100/techniques", H100, cases=made_up.techniques(1, "bf16"))
    assert "| bf16 |" in part("costs", "speed")
    lines = (folder / "records.jsonl").read_text().splitlines()
    failed = {"kind": "failure", "case": "mnmc_ddp_launch.py x1", "block": 1, "reason": "it broke"}
    (folder / "records.jsonl").write_text("\n".join([*lines, json.dumps(failed)]))
    assert part("costs", "speed") == ""
