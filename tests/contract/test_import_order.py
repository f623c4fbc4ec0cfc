"""Imports go one way (DESIGN, the way through the code), and only the edges know Flower."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lower may not import higher. Modules on one line may import each other.
LAYERS = [
    ["fl_app.errors", "fl_app.checks"],
    [
        "fl_app.privacy",
        "fl_app.stages",
        "fl_app.parallel",
        "fl_app.rng",
        "fl_app.plugins",
        "fl_app.integer_noise",
    ],
    ["fl_app.noise_schedule", "fl_app.layers", "fl_app.clipping"],
    ["fl_app.settings", "fl_app.overrides"],
    [
        "fl_app.data",
        "fl_app.partitioners",
        "fl_app.models",
        "fl_app.mechanisms",
        "fl_app.protection",
        "fl_app.accounting",
        "strategies.cohorts",
        "strategies.server_optimizers",
    ],
    ["fl_app.training", "fl_app.wire"],
    ["fl_app.node_policy", "fl_app.client_policy", "fl_app.client_round"],
    ["strategies"],
    ["fl_app.report", "fl_app.progress", "fl_app.run_directory", "fl_app.ledger_view"],
    ["fl_app.server_run"],
    ["fl_app.engines"],
    ["fl_app.rehearsal"],
    ["fl_app.cost"],
    ["fl_app.server_app", "fl_app.client_app", "fl_app.cli", "fl_app.run"],
]
MAY_IMPORT_FLWR = (
    "fl_app.wire",
    "fl_app.engines",
    "strategies.dp_fedavg",
    "strategies.roster",
    "fl_app.server_run",
    "fl_app.rehearsal",
    "fl_app.cost",
    "fl_app.server_app",
    "fl_app.client_app",
)


def modules() -> dict[str, Path]:
    found = {}
    for package in ("fl_app", "strategies"):
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def layer(name: str) -> int:
    best, rank = "", -1
    for i, names in enumerate(LAYERS):
        for prefix in names:
            if (name == prefix or name.startswith(prefix + ".")) and len(prefix) > len(best):
                best, rank = prefix, i
    return rank


def run_time_imports(path: Path) -> set[str]:
    """Imports that run with the module; those under TYPE_CHECKING or in functions do not count."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("name", sorted(modules()))
def test_module_imports_only_its_own_or_lower_layers(name: str) -> None:
    if name in ("fl_app", "strategies"):
        return
    own = layer(name)
    assert own >= 0, f"{name} has no place in the import order"
    for target in run_time_imports(modules()[name]):
        if target in modules() and target not in ("fl_app", "strategies"):
            assert layer(target) <= own, f"{name} imports {target}"


@pytest.mark.parametrize("name", sorted(modules()))
def test_only_the_edges_import_flower(name: str) -> None:
    tree = ast.walk(ast.parse(modules()[name].read_text()))
    roots = set()
    for node in tree:
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            roots.add(node.module.partition(".")[0])
    if not name.startswith(MAY_IMPORT_FLWR):
        assert "flwr" not in roots


def test_privacy_core_runs_without_flower() -> None:
    import subprocess
    import sys

    core = [
        "fl_app.settings", "fl_app.clipping", "fl_app.rng", "fl_app.accounting.plan",
        "fl_app.accounting.ledger", "fl_app.mechanisms.central_gaussian", "fl_app.training.dp_sgd",
        "strategies.cohorts.poisson", "strategies.server_optimizers.adam",
    ]  # fmt: skip
    code = f"import sys\nfor m in {core!r}: __import__(m)\nassert 'flwr' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
