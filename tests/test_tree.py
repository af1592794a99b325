"""The package's tree: what `ls` and a search should tell, held by reading the source alone.

Each check takes a package's folder and returns a sentence for each fault. The tests run it on
`shardtune/`, and on a small package that was broken on purpose: a check that can't fail holds
nothing.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import shardtune

PACKAGE = Path(shardtune.__file__).parent
SHARED_NAMES = {"strategy.py", "engine.py"}
"""One of each in every strategy's folder; files with dunder names may repeat as well."""
NO_STRATEGIES = {"auto", "expert", "layers", "pipeline", "tensor"}
"""Folders whose names are words of the mesh, of schedules or of any section, too."""
NAMING = frozenset({"id", "attr", "arg", "name"})
"""Fields of syntax nodes that hold an identifier."""
TYPE_VARIABLES = {"TypeVar", "TypeVarTuple", "ParamSpec"}


def import_circles(root: Path) -> list[str]:
    """Import circles between files: `a.py imports b.py (line 3), which imports a.py (line 7)`.

    Imports inside functions count: they are where circles hide. Those under `if TYPE_CHECKING` are
    never executed and don't count.
    """
    files = _files(root)
    graph = {
        module: {
            target: line
            for target, line in _imports(tree, module, path, root, set(files))
            if target != module
        }
        for module, (path, tree) in files.items()
    }
    shown = {module: path.relative_to(root).as_posix() for module, (path, _) in files.items()}
    return [_as_sentence(circle, graph, shown) for circle in _circles(graph)]


def repeated_basenames(root: Path) -> list[str]:
    """Files with the same name in two folders: who searches for one finds the other."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in _sources(root):
        if path.name not in SHARED_NAMES and not path.name.startswith("__"):
            found[path.name].append(path.relative_to(root).as_posix())
    return [
        f"{' and '.join(paths)}: two files are called {name}; give each a name of its own"
        for name, paths in sorted(found.items())
        if len(paths) > 1
    ]


def repeated_names(root: Path) -> list[str]:
    """Public classes, constants and type aliases that two modules define: one of them means
    something else, or the same fact stands in two places."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, tree in _files(root).values():
        for name, line in sorted(_definitions(tree.body).items()):
            found[name].append(f"{path.relative_to(root).as_posix()}:{line}")
    return [
        f"{' and '.join(places)}: {name} is defined in {len(places)} modules;"
        " import it from one, or name what each means"
        for name, places in sorted(found.items())
        if len(places) > 1
    ]


def strategies_named(root: Path) -> list[str]:
    """Strategies that a module outside `parallel/` names, by an import, an identifier or a word of
    a string: what it wants to know of one is declared in its capabilities.

    Docstrings may name them, and so may paths (`recipes/zero1.yaml`). Axes of the mesh, schedules
    and `auto` are called as strategies are, and are no strategies; nor are the libraries that
    `compat/` changes.
    """
    folders = {path.parent.name for path in (root / "parallel").glob("*/strategy.py")}
    words = "|".join([*sorted(folders - NO_STRATEGIES), r"zero[0-3]"])
    spoken = re.compile(rf"(?<![\w/])({words})(?![\w:.])", re.IGNORECASE)
    part = re.compile(rf"(^|_)({words})(_|$)", re.IGNORECASE)
    names_one = cache(lambda name: part.search(name) is not None)
    found = []
    files = _files(root)
    for module, (path, tree) in files.items():
        if path.relative_to(root).parts[0] in ("parallel", "compat"):
            continue
        shown = path.relative_to(root).as_posix()
        for target, line in _imports(tree, module, path, root, set(files)):
            if target.split(".")[1:2] == ["parallel"] and target.split(".")[2:3] in (
                [folder] for folder in folders
            ):
                found.append(f"{shown}:{line}: imports {target}; ask its capabilities")
        for name, line in _identifiers(tree):
            if names_one(name):
                found.append(f"{shown}:{line}: {name} names a strategy; ask its capabilities")
        for text, line in _strings(tree):
            if match := spoken.search(text):
                found.append(f"{shown}:{line}: a string names {match[0]!r}; ask its capabilities")
    return found


def test_no_strategy_is_named_outside_its_folder() -> None:
    faults = strategies_named(PACKAGE)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "from house.parallel.fsdp.strategy import build\n",
            "imports house.parallel.fsdp.strategy",
        ),
        ("from house.parallel.fsdp import strategy\n", "imports house.parallel.fsdp.strategy"),
        ("def f(job):\n    return job.type == 'ddp'\n", "a string names 'ddp'"),
        ("FIX = 'use strategy: {type: fsdp}'\n", "a string names 'fsdp'"),
        ("def f(n):\n    return f'zero2 of {n}'\n", "a string names 'zero2'"),
        ("def f(fsdp_groups):\n    pass\n", "fsdp_groups names a strategy"),
        ("def f(job):\n    return isinstance(job, DDP)\n", "DDP names a strategy"),
    ],
)
def test_a_strategy_that_is_named_elsewhere_is_told(house: Path, text: str, told: str) -> None:
    _write(house, "plan/rules.py", text)
    (fault,) = strategies_named(house)
    assert fault.startswith("plan/rules.py:")
    assert told in fault


def test_no_public_name_with_two_meanings() -> None:
    faults = repeated_names(PACKAGE)
    assert not faults, "\n".join(faults)


def test_no_import_circle() -> None:
    faults = import_circles(PACKAGE)
    assert not faults, "\n".join(faults)


def test_no_basename_twice() -> None:
    faults = repeated_basenames(PACKAGE)
    assert not faults, "\n".join(faults)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small package that has none of the faults, and what looks like each of them."""
    root = tmp_path / "house"
    _write(root, "__init__.py", "")
    _write(root, "core/__init__.py", "")
    _write(root, "core/size.py", "GIB = 2**30\nKINDS, LEAST = ('a',), 1\nclass Size: ...\n")
    _write(
        root,
        "core/mesh.py",
        "from typing import TYPE_CHECKING, TypeVar\n"
        "from house.core.size import GIB, Size\n"  # a re-export defines nothing
        "if TYPE_CHECKING:\n    from house.plan.search import Best\n"
        "Item = TypeVar('Item')\n_BLOCK = 1\n",
    )
    _write(
        root,
        "plan/search.py",
        "from typing import TypeVar\nItem = TypeVar('Item')\n_BLOCK = 2\n"
        "class Best:\n    GIB = 1\n"  # an attribute is no name of the module
        "def search():\n    from house.core import mesh\n    return mesh\n",
    )
    _write(root, "plan/__init__.py", "from house.plan.search import Best\n")
    for name in ("ddp", "fsdp"):
        _write(root, f"parallel/{name}/__init__.py", "")
        _write(root, f"parallel/{name}/engine.py", "")
        _write(root, f"parallel/{name}/strategy.py", "def build():\n    from . import engine\n")
    _write(root, "parallel/__init__.py", "")
    _write(
        root,
        "plan/words.py",
        '"""As ddp does."""\nAXES = ("tensor", "data")\nOP = "fsdp::copy"\n'
        'HELP = "shardtune train recipes/zero1.yaml recipes/ddp_lora.yaml"\n'
        'class Field:\n    size: int = 1\n    """Of fsdp."""\n',
    )
    return root


def test_a_good_tree_has_no_faults(house: Path) -> None:
    assert import_circles(house) == []
    assert repeated_basenames(house) == []
    assert repeated_names(house) == []
    assert strategies_named(house) == []


def test_a_circle_is_named_with_its_lines(house: Path) -> None:
    _write(house, "core/size.py", "GIB = 2**30\ndef fit():\n    import house.plan.search\n")
    assert import_circles(house) == [
        "core/mesh.py imports core/size.py (line 2), which imports plan/search.py (line 3),"
        " which imports core/mesh.py (line 7)"
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "from house.parallel.fsdp.strategy import build",
        "from house.parallel.fsdp import strategy",
        "import house.parallel.fsdp.strategy as theirs",
        "from . import strategy",
        "from .strategy import build",
        "from ..fsdp import strategy",
        "try:\n    from .strategy import build\nexcept ImportError:\n    pass",
        "class Engine:\n    def build(self):\n        from . import strategy",
    ],
)
def test_every_form_of_import_counts(house: Path, statement: str) -> None:
    _write(house, "parallel/fsdp/engine.py", statement)
    (fault,) = import_circles(house)
    assert fault.startswith("parallel/fsdp/engine.py imports parallel/fsdp/strategy.py (line ")


def test_a_package_is_a_file_of_the_circle(house: Path) -> None:
    _write(house, "plan/search.py", "from house.plan import Best\nclass Other: ...\n")
    assert import_circles(house) == [
        "plan/__init__.py imports plan/search.py (line 1), which imports plan/__init__.py (line 1)"
    ]


def test_a_second_basename_is_named(house: Path) -> None:
    _write(house, "plan/mesh.py", "")
    assert repeated_basenames(house) == [
        "core/mesh.py and plan/mesh.py: two files are called mesh.py; give each a name of its own"
    ]


@pytest.mark.parametrize(
    ("definition", "name", "line"),
    [
        ("class Size: ...", "Size", 3),
        ("GIB: int = 10**9", "GIB", 1),
        ("if True:\n    Size = int | str", "Size", 3),
        ("try:\n    import numpy\nexcept ImportError:\n    LEAST = 2", "LEAST", 2),
        ("LEAST, Most = 2, 3", "LEAST", 2),
        ("type Size = int", "Size", 3),
    ],
)
def test_a_second_definition_is_named(house: Path, definition: str, name: str, line: int) -> None:
    try:
        ast.parse(definition)
    except SyntaxError:
        pytest.skip("this Python has no such statement")
    _write(house, "plan/fit.py", definition)
    (fault,) = repeated_names(house)
    own = 1 + definition[: definition.index(name)].count("\n")
    assert fault == (
        f"core/size.py:{line} and plan/fit.py:{own}: {name} is defined in 2 modules;"
        " import it from one, or name what each means"
    )


@pytest.mark.slow
def test_this_package_fails_when_it_is_broken(tmp_path: Path) -> None:
    """The package itself, broken in a copy: nothing in its size or forms hides a fault."""
    root = tmp_path / "shardtune"
    for path in _sources(PACKAGE):
        _write(root, path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))
    with (root / "errors.py").open("a", encoding="utf-8") as file:
        file.write("\ndef _look() -> None:\n    import shardtune.core.mesh\n")
    _write(root, "plan/mesh.py", "class Mesh: ...\n")
    assert any("errors.py" in fault and "core/mesh.py" in fault for fault in import_circles(root))
    assert any("core/mesh.py and plan/mesh.py:" in fault for fault in repeated_basenames(root))
    assert any("plan/mesh.py:1: Mesh is defined in" in fault for fault in repeated_names(root))


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _sources(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def _files(root: Path) -> dict[str, tuple[Path, ast.Module]]:
    """Every file by its module's name; a package's `__init__.py` by that of the package."""
    found = {}
    for path in _sources(root):
        parts = path.relative_to(root.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[module] = (path, _parsed(path.read_text(encoding="utf-8")))
    return found


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def _nodes(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def _imports(
    tree: ast.Module, module: str, path: Path, root: Path, known: set[str]
) -> Iterator[tuple[str, int]]:
    """The modules of this package that a file imports, and where.

    That importing `a.b.c` executes `a` and `a.b` first is no import of theirs: who stands in a
    package always has it loaded.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in _executed(tree.body):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (up, node.module) if part)
            submodules = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in known else base for name in submodules]
        else:
            continue
        for name in names:
            if name in known:
                yield name, node.lineno


def _identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names, attributes, arguments and definitions. What is imported is another check's."""
    for node in _nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.alias)):
            continue
        for key in NAMING.intersection(node._fields):
            name = getattr(node, key)
            if isinstance(name, str):
                yield name, getattr(node, "lineno", 0)


def _strings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Strings that are no docstrings, of a module, a function or a field."""
    alone = {id(node.value) for node in _nodes(tree) if isinstance(node, ast.Expr)}
    for node in _nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value, node.lineno


def _executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements but those that stand under `if TYPE_CHECKING`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
            yield from _executed(statement.orelse)
        else:
            for block in _blocks(statement):
                yield from _executed(block)


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The statements inside a statement, by block."""
    blocks = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
    inner = [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
    return [*blocks, *(each.body for each in inner)]


def _circles(graph: dict[str, dict[str, int]]) -> list[list[str]]:
    """One shortest circle through the first module of each knot of modules that reach each
    other."""
    circles: list[list[str]] = []
    named: set[str] = set()
    for start in sorted(graph):
        circle = [] if start in named else _way_back(start, graph)
        if circle:
            circles.append(circle)
            reached = _reached(start, graph)
            named |= {module for module in reached if start in _reached(module, graph)}
    return circles


def _way_back(start: str, graph: dict[str, dict[str, int]]) -> list[str]:
    """The shortest way from a module through its imports to itself; empty where there is none."""
    ways, seen = [[start]], {start}
    while ways:
        longer = []
        for way in ways:
            for target in sorted(graph[way[-1]]):
                if target == start:
                    return way
                if target not in seen:
                    seen.add(target)
                    longer.append([*way, target])
        ways = longer
    return []


def _reached(start: str, graph: dict[str, dict[str, int]]) -> set[str]:
    found, open_ = {start}, [start]
    while open_:
        new = set(graph[open_.pop()]) - found
        found |= new
        open_ += new
    return found


def _as_sentence(circle: list[str], graph: dict[str, dict[str, int]], shown: dict[str, str]) -> str:
    steps = [
        f"imports {shown[target]} (line {graph[module][target]})"
        for module, target in zip(circle, [*circle[1:], circle[0]], strict=True)
    ]
    return f"{shown[circle[0]]} {', which '.join(steps)}"


def _definitions(body: list[ast.stmt]) -> dict[str, int]:
    """Public classes and capitalised names that a module assigns, each with its first line."""
    found: dict[str, int] = {}
    for node in body:
        names: dict[str, int] = {}
        if isinstance(node, ast.ClassDef):
            names = {node.name: node.lineno}
        elif isinstance(node, ast.Assign) and not _is_type_variable(node.value):
            names = _assigned(node.targets)
        elif isinstance(node, ast.AnnAssign) and not _is_type_variable(node.value):
            names = _assigned([node.target])
        elif type(node).__name__ == "TypeAlias":  # `type X = ...`, from Python 3.12
            names = _assigned([node.name])  # type: ignore[attr-defined]
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            names = _definitions([inner for block in _blocks(node) for inner in block])
        for name, line in names.items():
            if name[0].isupper():
                found.setdefault(name, line)
    return found


def _assigned(targets: list[ast.expr]) -> dict[str, int]:
    return {
        node.id: node.lineno
        for target in targets
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _is_type_variable(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in TYPE_VARIABLES
