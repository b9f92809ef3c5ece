"""The rules of the house, read from the imports of every module of the package."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jax_grpo"

# A module imports only from lower layers. A new module gets its line here.
LAYERS = {
    "__init__": 0,
    "types": 0,
    "arrays": 0,
    "advantages": 1,
    "losses": 1,
    "kl": 1,
    "preference": 1,
    "value": 1,
    "logprobs": 1,
    "sampling": 1,
    "rewards": 1,
    "policy_gradient": 2,
    "algorithms": 2,
    "models": 2,
    "sharding": 2,
    "rows": 2,
    "encoding": 2,
    "arithmetic": 2,
    "data": 3,
    "rollout": 3,
    "scoring": 3,
    "packing": 4,
    "step": 4,
    "optimizer": 4,
    "checkpoint": 4,
    "metrics": 4,
    "evaluate": 4,
    "stages": 5,
    "memory": 6,
    "study": 6,
    "collect": 6,
    "dataset": 7,
    "sampled": 7,
    "train": 8,
    "commands": 9,
    "__main__": 9,
}
# Here a module may import its neighbours.
FAMILIES = {
    "models": "models",
    "rewards": "rewards",
    "policy_gradient": "algorithms",
    "algorithms": "algorithms",
    "commands": "commands",
    "__main__": "commands",
}

NEVER_SEE_A_MODEL = (
    "losses",
    "kl",
    "preference",
    "value",
    "advantages",
    "policy_gradient",
    "algorithms",
)


def _name(path: Path) -> str:
    """`models/llama.py` is `models.llama`; a package's `__init__.py` goes by its own name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def _imports(module: str) -> frozenset[str]:
    """All that a module imports, wherever in its text, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: write the import in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@cache
def _ours(module: str) -> frozenset[str]:
    """The modules of the package that a module imports, without the packages they lie in."""
    found = set()
    for name in _imports(module):
        parts = name.split(".")
        if parts[0] == "jax_grpo":
            dotted = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
            found.add(next((part for part in dotted if part in MODULES), "__init__"))
    return frozenset(found - {module})


def _closure(module: str) -> set[str]:
    """A module and all of ours that Python runs to import it."""
    seen: set[str] = set()
    todo = {module}
    while todo:
        name = todo.pop()
        seen.add(name)
        parents = {"__init__", name.rpartition(".")[0]} & MODULES.keys()
        todo |= (_ours(name) | parents) - seen
    return seen


def _uses(module: str, *forbidden: str) -> set[str]:
    """Which of the forbidden packages a module imports."""
    return {
        name
        for name in forbidden
        if any(found == name or found.startswith(f"{name}.") for found in _imports(module))
    }


def _part(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_from_lower_layers(module):
    part = _part(module)
    assert part in LAYERS, f"give jax_grpo/{part} its layer in this test"
    for other in _ours(module):
        neighbours = part in FAMILIES and FAMILIES[part] == FAMILIES.get(_part(other))
        assert neighbours or LAYERS[_part(other)] < LAYERS[part], f"{module} imports {other}"


@pytest.mark.parametrize("module", [name for name in MODULES if _part(name) == "rewards"])
def test_rewards_work_without_jax(module):
    for name in _closure(module):
        assert not _uses(name, "jax", "jaxlib", "flax", "optax", "orbax"), f"through {name}"


@pytest.mark.parametrize("module", NEVER_SEE_A_MODEL)
def test_the_textbook_pages_never_see_a_model(module):
    for name in _closure(module):
        assert not _uses(name, "transformers", "tokenizers", "flax", "ml_collections")
        assert _part(name) != "models"


@pytest.mark.parametrize("module", [name for name in MODULES if LAYERS.get(_part(name), 6) < 6])
def test_flags_and_configs_stay_at_the_top(module):
    assert not _uses(module, "ml_collections", "absl.flags", "absl.app")


@pytest.mark.parametrize("module", MODULES)
def test_no_torch(module):
    assert not _uses(module, "torch")
