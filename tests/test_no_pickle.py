"""Nothing of ours is unpickled or evaluated: files and messages are text that is checked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("orchestrator", "db", "workloads")
    for path in (PROJECT / folder).rglob("*.py")
)
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
    ("pandas", "read_pickle"),
}


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (
                    f"import {name.name}" for name in names if name.name.split(".")[0] in MODULES
                )
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield f"from {module} import"
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield f"{name}()"
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) if (
                module,
                name,
            ) in UNSAFE_ATTRIBUTES:
                yield f"{module}.{name}()"
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords
            ):
                safe = any(
                    word.arg == "weights_only" and getattr(word.value, "value", None) is True
                    for word in keywords
                )
                yield from [] if safe else ["torch.load() without weights_only=True"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_no_source_unpickles_or_evaluates(path: Path) -> None:
    assert list(dangers(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from dill import loads",
        "eval('1')",
        "yaml.load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
    ],
)
def test_the_check_sees_what_it_looks_for(text: str) -> None:
    assert len(list(dangers(ast.parse(text)))) == 1
