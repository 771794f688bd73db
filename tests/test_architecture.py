"""The house: imports point one way, families stay inside `models`, and what a reader meets first is there."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "longstraw_jax"

# A module or package may import what stands before it, and itself. A new file takes its place here.
ORDER = (
    "backend", "errors", "types", "tokenizer", "groups", "config", "sharding", "deviceless", "kernels_pallas", "models", "policy",
    "loading", "state", "programs", "gradients", "capture", "objective", "members", "score", "replay", "sweep", "update", "receipts",
    "transaction", "conventional", "evidence", "planner", "cli",
)
# Within `models`, likewise: only the registry knows all families, and a family knows no other.
MODELS_ORDER = ("checkpoint", "adapters", "base", "layers", "parameters", "family", "families", "registry")
FAMILIES = {"qwen36": "qwen", "glm52": "glm"}  # folder in `models`, and the word that the engine must not know
NAMES_FAMILIES = ("models", "cli")  # the command line may have a family's model as its default


def parts(file: Path) -> tuple[str, ...]:
    """`longstraw_jax/models/layers/mlp.py` -> ("models", "layers", "mlp"); the package's own `__init__` -> ()."""
    inside = file.relative_to(PACKAGE).with_suffix("").parts
    return inside[:-1] if inside[-1] == "__init__" else inside


FILES = {parts(file): file for file in sorted(PACKAGE.rglob("*.py"))}
MODULES = pytest.mark.parametrize("module", FILES, ids=lambda module: ".".join(module) or "__init__")


def imports(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """The package's modules that a module imports, wherever in it; not what only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield from imports(ast.Module([other], []))
        elif isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")[1:]) for alias in node.names if alias.name.split(".")[0] == PACKAGE.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; wanted the module's full name"
            origin = tuple(node.module.split("."))
            if origin[0] == PACKAGE.name:
                yield from (_module_of(origin[1:], alias.name) for alias in node.names if alias.name != "__version__")
        else:
            yield from imports(node)


def _module_of(origin: tuple[str, ...], name: str) -> tuple[str, ...]:
    return (*origin, name) if (*origin, name) in FILES else origin


def imports_of(module: tuple[str, ...]) -> set[tuple[str, ...]]:
    return set(imports(ast.parse(FILES[module].read_text())))


def rank(module: tuple[str, ...]) -> int:
    return ORDER.index(module[0]) if module else len(ORDER)  # the package itself sees everything


def rank_in_models(module: tuple[str, ...]) -> int:
    name = module[1] if len(module) > 1 else "checkpoint"
    return MODELS_ORDER.index("families" if name in FAMILIES else name)


def test_every_module_has_its_place():
    assert {module[0] for module in FILES if module} <= set(ORDER)
    assert {module[1] for module in FILES if module[:1] == ("models",) and len(module) > 1} <= {*MODELS_ORDER, *FAMILIES}
    assert set(ORDER) <= {module[0] for module in FILES if module}, "a name in ORDER that is no module"


@MODULES
def test_imports_point_one_way(module):
    for other in imports_of(module):
        if other[:1] != module[:1] or not module:
            assert rank(other) < rank(module), f"{'.'.join(module)} imports {'.'.join(other) or 'the package itself'}"
        elif module[0] == "models" and other[:2] != module[:2]:
            assert rank_in_models(other) < rank_in_models(module), f"{'.'.join(module)} imports {'.'.join(other)}"


@MODULES
def test_no_family_in_the_engine(module):
    if module[:1] not in [(name,) for name in NAMES_FAMILIES]:
        text = FILES[module].read_text().lower()
        assert not [word for word in FAMILIES.values() if word in text]


@MODULES
def test_public_modules_say_what_they_are(module):
    if not any(part.startswith("_") for part in module):
        assert (ast.get_docstring(ast.parse(FILES[module].read_text())) or "").strip()


@pytest.mark.parametrize("name", ["models", "sharding", "kernels_pallas"])
def test_links_at_the_root(name):
    link = ROOT / name
    assert link.is_symlink() and link.resolve() == PACKAGE / name
    assert not link.readlink().is_absolute()


def test_what_counts_as_an_import():
    source = """
from __future__ import annotations
import json, longstraw_jax.models.base as base
from longstraw_jax.models import parameters, registry as r
from longstraw_jax.types import Group
from longstraw_jax import __version__, capture
if TYPE_CHECKING:
    from longstraw_jax.cli import main
else:
    from longstraw_jax import policy
def late():
    from longstraw_jax.state import tree_bytes
"""
    assert set(imports(ast.parse(source))) == {
        ("models", "base"), ("models", "parameters"), ("models", "registry"), ("types",), ("capture",), ("policy",),
        ("state",)}
    with pytest.raises(AssertionError, match="relative import"):
        set(imports(ast.parse("from .types import Group")))
