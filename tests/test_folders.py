"""The folders of the product, and those of its tests, which mirror them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The packages of the product, `orchestrator` apart: its tests have no folder of its name.
OTHERS = ("db", "workloads", "layout_sweep")
# Tests that concern several packages (docs/decisions/folders.md).
WITHOUT_A_PACKAGE = {
    "acceptance",
    "benchmarks",
    "compat",
    "faults",
    "multi_host",
    "recipes",
    "workloads/llama/equivalence",
}
# Packages without behaviour of their own; the modules above them have the tests.
WITHOUT_TESTS = {"db/migrations", "db/migrations/versions"}


def packages(root: Path) -> set[str]:
    """The packages below a folder, by their path from there."""
    found = {str(init.parent.relative_to(root)) for init in root.rglob("__init__.py")}
    return found - {"."}


def test_orchestrator_has_only_packages_and_the_core_only_its_errors() -> None:
    def modules(folder: str) -> set[str]:
        return {path.name for path in (ROOT / folder).iterdir() if path.is_file()}

    assert modules("orchestrator") == {"__init__.py"}
    assert modules("orchestrator/core") == {"__init__.py", "errors.py"}


def test_the_tests_mirror_the_packages_of_the_product() -> None:
    product = packages(ROOT / "orchestrator")
    for root in OTHERS:
        product |= {root, *(f"{root}/{name}" for name in packages(ROOT / root))}
    mirrored = {name for name in packages(ROOT / "tests") if name not in WITHOUT_A_PACKAGE}
    assert mirrored == product - WITHOUT_TESTS


def test_each_module_has_a_test_of_its_name_or_is_named_with_those_that_reach_it() -> None:
    named = named_modules((ROOT / "docs/decisions/folders.md").read_text())
    without = {
        f"{folder}/{path.stem}"
        for folder, path in modules_with_functions()
        if not (ROOT / "tests" / folder / f"test_{path.stem}.py").is_file()
    }
    assert without - named == set(), "write a test, or say what reaches the module"
    assert named - without == set(), "these have a test of their name, or are gone"


def named_modules(page: str) -> set[str]:
    """The modules in the first column of the page's table: `db/read`: `holder` `nodes`; ..."""
    found = set()
    for row in re.findall(r"^\| (`[a-z_/]+`: .*?) \|", page, re.MULTILINE):
        for group in row.split("; "):
            folder, *names = re.findall(r"`([^`]+)`", group)
            found |= {f"{folder}/{name}" for name in names}
    return found


def modules_with_functions() -> list[tuple[str, Path]]:
    """Each with the folder of its tests."""
    found = []
    for root in ("orchestrator", *OTHERS):
        for path in (ROOT / root).rglob("*.py"):
            folder = str(path.parent.relative_to(ROOT / root if root == "orchestrator" else ROOT))
            is_code = not path.name.startswith("__") and folder not in WITHOUT_TESTS
            if is_code and re.search(r"^ *def ", path.read_text(), re.MULTILINE):
                found.append((folder, path))
    return found


def test_every_package_of_the_product_is_in_the_layers_of_the_linter() -> None:
    """Those of `orchestrator`, and the modules of the other packages, are in exhaustive ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    shipped = {name.rstrip("*") for name in project["setuptools"]["packages"]["find"]["include"]}
    linter = project["importlinter"]
    assert set(linter["root_packages"]) == shipped
    layers = [one for one in linter["contracts"] if one["type"] == "layers"]
    [of_all] = [one for one in layers if "containers" not in one]
    named = {name.partition(".")[0] for layer in of_all["layers"] for name in layer.split(" | ")}
    assert named == shipped
    assert all(one["exhaustive"] for one in layers if one is not of_all)


def test_no_contract_of_the_linter_has_an_exception() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    exceptions = {"ignore_imports", "exhaustive_ignores", "skip_descendants"}
    assert not any(exceptions & one.keys() for one in project["importlinter"]["contracts"])
