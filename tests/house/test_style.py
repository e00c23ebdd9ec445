"""Sizes, cards, names and things that are never done here."""

from __future__ import annotations

import ast
import re
import statistics

import pytest
from house import PACKAGE, Source, in_rooms, sources, strings

from meshwright.core.codec import field_types
from meshwright.core.technique import technique_named, technique_names
from meshwright.schedules import SCHEDULES

MOST_LINES_OF_A_FILE = 800
MOST_LINES_OF_A_FUNCTION = 80
MOST_LINES_OF_A_MEDIAN_FUNCTION = 12
LONG_FUNCTIONS: dict[str, int] = {}
"""`file:function` -> lines, of the few that may be longer. They may shrink, not grow."""

CARD = ("What:", "When it helps:", "When it does not:", "Cost:", "Exactness:")

# Where a technique's name is also another word of ours, and says that word.
OTHER_WORDS = {
    ("core/profile.py", "rows"),  # what dim 0 of a table counts
    ("core/profile.py", "tensor"),  # how splitting divides an op: none, sequence, tensor
    ("core/technique.py", "compile"),  # a phase of `apply`
    ("core/time_ledger.py", "compile"),  # a category of a run's time
    ("runtime/run_record.py", "compile"),
    ("core/work.py", "recompute"),  # a phase of a step
    ("simulator/stage_seconds.py", "recompute"),
    ("techniques/parameter_server.py", "async"),  # whom an update waits for: nobody
    # Still to go: what whole matrices are gathered over, and who splits heads beside context.
    ("techniques/context.py", "tp"),
}


def functions() -> list[tuple[str, int]]:
    found = []
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((f"{source.place}:{node.name}", node.end_lineno - node.lineno + 1))
    assert len(found) > 200
    return found


def test_files_are_short() -> None:
    long = {source.place: source.text.count("\n") for source in sources()}
    assert {place: lines for place, lines in long.items() if lines > MOST_LINES_OF_A_FILE} == {}


def test_functions_are_short() -> None:
    long = {name: lines for name, lines in functions() if lines > LONG_FUNCTIONS.get(name, MOST_LINES_OF_A_FUNCTION)}
    assert long == {}
    assert statistics.median(lines for _, lines in functions()) <= MOST_LINES_OF_A_MEDIAN_FUNCTION


def test_exceptions_to_the_length_are_still_needed() -> None:
    lengths = dict(functions())
    needless = [name for name in LONG_FUNCTIONS if lengths.get(name, 0) <= MOST_LINES_OF_A_FUNCTION]
    assert needless == []


FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.load", "os.system", "marshal.loads"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}


def forbidden(tree: ast.AST) -> list[str]:
    """What would run or trust what it must not."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in FORBIDDEN_CALLS:
                found.append(f"line {node.lineno}: {ast.unparse(node.func)}()")
            for keyword in node.keywords:
                is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if (keyword.arg == "shell" and is_true) or keyword.arg == "allow_pickle":
                    found.append(f"line {node.lineno}: {ast.unparse(keyword)}")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"line {node.lineno}: {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.Constant) and node.value == "0.0.0.0":
            found.append(f"line {node.lineno}: listens to the world")
    return found


def test_nothing_unsafe_is_called() -> None:
    wrong = {source.place: forbidden(source.tree) for source in sources() if forbidden(source.tree)}
    # numpy's own switch, turned off, is the safe side.
    wrong = {
        place: rest
        for place, found in wrong.items()
        if (rest := [each for each in found if "allow_pickle=False" not in each])
    }
    assert wrong == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "eval(text)",
        "subprocess.run(words, shell=True)",
        "yaml.load(text)",
        "serve('0.0.0.0')",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_the_guard_does_notice(code: str) -> None:
    assert len(forbidden(ast.parse(code))) == 1


def test_children_start_in_one_way_alone() -> None:
    """`core/process.py` leaves the working folder out of what they import."""
    found = [source.place for source in sources() if "sys.executable" in source.text]
    assert found == ["core/process.py"]


def test_files_of_a_run_folder_are_written_whole_and_never_through_a_link() -> None:
    """By `core/files.py` or `checkpoint/save.py`."""
    careless = re.compile(r"\.write_(?:text|bytes)\(|(?<!fd)\bopen\([^)\n]*, [\"'][wa]")
    found = [
        f"{source.place}:{number}"
        for source in in_rooms("runtime", "launch", "checkpoint", "run")
        for number, line in enumerate(source.text.splitlines(), start=1)
        if careless.search(line)
    ]
    assert found == []
    assert careless.search('path.write_text("x")')
    assert careless.search('open(path, "w")')


@pytest.mark.parametrize("name", technique_names())
def test_a_technique_has_its_card_and_is_one_class(name: str) -> None:
    tree = ast.parse((PACKAGE / "techniques" / f"{name}.py").read_text(encoding="utf-8"))
    card = ast.get_docstring(tree) or ""
    places = [card.find(word) for word in CARD]
    assert -1 not in places, f"the card lacks {[word for word in CARD if word not in card]}"
    assert places == sorted(places)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(classes) == 1
    defined = {node.name for node in classes[0].body if isinstance(node, ast.FunctionDef)}
    assert {"price", "apply"} <= defined, "a technique has two halves"


def named(names: set[str], guarded: list[Source]) -> list[str]:
    return [
        f"{source.place}:{line} says {text!r}"
        for source in guarded
        for text, line in strings(source)
        if text in names and (source.place, text) not in OTHER_WORDS
    ]


def test_no_other_package_knows_a_technique_by_name() -> None:
    names = set(technique_names())
    assert len(names) >= 8
    guarded = in_rooms(
        "core", "ops", "schedules", "simulator", "planner", "ask", "report", "run", "runtime", "cli", "optimizers"
    )
    assert named(names, guarded) == []


def test_no_other_file_knows_an_axis_by_name() -> None:
    owners = {technique_named(name).axis: f"techniques/{name}.py" for name in technique_names()}
    owners.pop("")
    assert len(owners) >= 5
    wrong = [each for axis, owner in owners.items() for each in named({axis}, sources_but(owner))]
    assert wrong == []


def test_no_other_file_knows_a_schedule_by_name() -> None:
    """`schedules` has them, and the technique that cuts stages lists them as its choices."""
    cutters = {
        f"techniques/{name}.py" for name in technique_names() if "schedule" in field_types(technique_named(name))
    }
    assert len(cutters) == 1
    guarded = [source for source in sources_but(*cutters) if source.room != "schedules"]
    assert named(set(SCHEDULES), guarded) == []


def sources_but(*places: str) -> list[Source]:
    return [source for source in sources() if source.place not in places]


def test_words_that_name_nothing_are_not_used() -> None:
    empty = re.compile(r"(?:^|_)(?:manager|handler|helper|helpers|utils|common|misc)(?:$|_)")
    names = [
        (source.place, node.name)
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    names += [(source.place, source.path.stem) for source in sources()]
    assert [pair for pair in names if empty.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", pair[1]).lower())] == []
    assert empty.search("device_manager")


def returned_in_place(tree: ast.AST) -> list[str]:
    """Forwards of autograd functions that return what they wrote in place: compiled by torch 2.11, no gradient."""
    found = []
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef) or not any(
            ast.unparse(b).endswith("autograd.Function") for b in owner.bases
        ):
            continue
        forward = next(each for each in owner.body if isinstance(each, ast.FunctionDef) and each.name == "forward")
        for node in ast.walk(forward):
            value = node.value if isinstance(node, ast.Return) else None
            while isinstance(value, ast.Call) and ast.unparse(value.func).endswith((".to", ".squeeze", ".view")):
                value = value.func.value  # type: ignore[attr-defined]
            if isinstance(value, ast.Call) and re.search(r"\w_$", ast.unparse(value.func)):
                found.append(f"{owner.name}: {ast.unparse(value)}")
    return found


def test_compiled_functions_return_nothing_they_wrote_in_place() -> None:
    bad = "class F(torch.autograd.Function):\n def forward(ctx, x):\n  return x.exp().mul_(2).to(x.dtype)"
    assert returned_in_place(ast.parse(bad)) == ["F: x.exp().mul_(2)"]
    assert [found for source in sources() for found in returned_in_place(source.tree)] == []


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(source.place)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
