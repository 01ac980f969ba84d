# SPDX-License-Identifier: Apache-2.0
"""The layout is a promise to people who copy single files: leaves import nothing of ours, parts only leaves."""
from __future__ import annotations

import ast
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEAVES = ("config", "topology", "fsdp", "safetensors_io", "generate", "topk_logprobs", "losses_kl", "phases", "ownership",
          "checkpoint", "metrics", "data", "run", "models.lm", "flow", "losses_dmd", "lora", "ema", "models.dit",
          "models.mlp2d", "models.discriminator", "noise", "pictures")
PARTS = ("build", "role", "rollout", "teacher", "export", "report", "adapters", "train_flow")
SCRIPTS = ("train_opd.py", "train_dmd.py", "distill_core/sample.py")
THIRD_PARTY = {"torch", "numpy", "yaml", "safetensors"}


def path_of(module: str) -> Path:
    return ROOT / "distill_core" / f"{module.replace('.', '/')}.py"


def imports_of(tree: ast.AST) -> set[str]:
    """Dotted names of everything imported anywhere in a file."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports do not survive copying"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def test_every_module_has_a_floor():
    """Catches a new file that nobody has put into a floor, which no other test here would look at."""
    found = {str(p.relative_to(ROOT / "distill_core").with_suffix("")).replace("/", ".")
             for p in (ROOT / "distill_core").rglob("*.py") if p.name != "__init__.py"}
    assert found == {*LEAVES, *PARTS, "sample"}
    assert all(not p.read_text() for p in (ROOT / "distill_core").rglob("__init__.py"))


def floor_faults(source: str, allowed: tuple[str, ...]) -> list[str]:
    own = {name.removeprefix("distill_core.") for name in imports_of(ast.parse(source)) if name.startswith("distill_core.")}
    return [name for name in own if not any(name == ok or name.startswith(ok + ".") or ok.startswith(name + ".") for ok in allowed)]


def test_floors():
    """Catches a leaf that imports our code, a part that imports a part or a script."""
    for module in LEAVES:
        assert floor_faults(path_of(module).read_text(), ()) == [], module
    for module in PARTS:
        assert floor_faults(path_of(module).read_text(), LEAVES) == [], module
    # negative controls: both kinds of fault are seen
    assert floor_faults("import distill_core.fsdp", ())
    assert floor_faults("def f():\n    from distill_core.role import Role", LEAVES)


def test_top_level_imports_are_the_five_dependencies():
    """Catches an optional package imported at the top of a file, which would make it a requirement for everybody."""
    for module in (*LEAVES, *PARTS):
        tree = ast.parse(path_of(module).read_text())
        top = {name.split(".")[0] for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))
               for name in imports_of(ast.Module([node], []))}
        foreign = {name for name in top if name not in sys.stdlib_module_names} - {"distill_core"}
        assert foreign <= THIRD_PARTY, (module, foreign)
    assert "torch" not in imports_of(ast.parse(path_of("config").read_text())), "config must load without torch"


def test_each_leaf_alone_imports_in_an_empty_folder(tmp_path):
    """Catches hidden dependencies and import-time work: a copied leaf must import, print nothing and write nothing."""
    for module in LEAVES:
        shutil.copy(path_of(module), tmp_path / path_of(module).name)
    names = [path_of(module).stem for module in LEAVES]
    for name in names:  # one process, one leaf visible at a time
        (tmp_path / name).mkdir()
        shutil.move(tmp_path / f"{name}.py", tmp_path / name / f"{name}.py")
    code = "; ".join(f"sys.path[0] = {str(tmp_path / name)!r}; import {name}" for name in names)
    result = subprocess.run([sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, ''); {code}"], cwd=tmp_path,
                            capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_NAMES = ("torch.load", "torch.save", "pickle", "marshal", "shelve", "yaml.load", "yaml.unsafe_load", "os.system",
                   "urllib", "requests", "http.client", "socket", "trust_remote_code")


def unsafe_uses(source: str) -> list[str]:
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS or name in FORBIDDEN_NAMES or "_object" in name.split(".")[-1]:
                found.append(name)
            if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                found.append("allow_pickle")
    return found + [name for name in imports_of(tree) if name.split(".")[0] in FORBIDDEN_NAMES]


def test_nothing_unpickles_evaluates_or_opens_the_network():
    """Catches a way for a downloaded folder or a peer's bytes to run code."""
    for path in [*(ROOT / "distill_core").rglob("*.py"), *ROOT.glob("train_*.py")]:
        assert unsafe_uses(path.read_text()) == [], path
    for bad in ("torch.load('x')", "eval('1')", "import pickle", "dist.broadcast_object_list(x)", "yaml.load(x)",
                "np.load(x, allow_pickle=True)", "from urllib.request import urlopen"):
        assert unsafe_uses(bad), bad


def test_functions_stay_short():
    """Catches drift towards the 200-line functions that make trainers unreadable."""
    sizes = [node.end_lineno - node.lineno + 1 for path in [*(ROOT / "distill_core").rglob("*.py"), *ROOT.glob("train_*.py")]
             for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    assert statistics.median(sizes) <= 12 and max(sizes) <= 60, (statistics.median(sizes), max(sizes))


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_imports_a_script(script):
    """Catches a library that reaches back into a script."""
    for path in (ROOT / "distill_core").rglob("*.py"):
        assert script.removesuffix(".py").replace("/", ".") not in imports_of(ast.parse(path.read_text())), path
