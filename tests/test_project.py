"""Rules of the whole repository: who may import what, sizes, README, pins, and nothing that belongs to one machine."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from k3_sglang.compat import SGLANG_VERSION
from k3_sglang.launch.preflight import ENTRY_POINTS
from k3_sglang.launch.settings import read_file, validate

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
HEAVY = ("torch", "sglang", "transformers", "triton", "xgrammar")


@cache
def repository_files() -> tuple[Path, ...]:
    """Files that are, or are about to be, under version control."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, timeout=60).stdout
    paths = (REPOSITORY / name for name in listing.decode().split("\0") if name)
    return tuple(sorted(path for path in paths if path.is_file()))


def sources(*roots: str) -> list[Path]:
    """Python files below some folders of the repository."""
    return [
        path for path in repository_files() if path.suffix == ".py" and path.relative_to(REPOSITORY).parts[0] in roots
    ]


def module_name(path: Path) -> str:
    """Dotted name of a source file."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names a file imports anywhere, ``from a import b`` as ``a.b``."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def inside(name: str, *packages: str) -> bool:
    """Whether a dotted name is one of the packages or below one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offenders(paths: list[Path], *forbidden: str, allowed: tuple[str, ...] = ()) -> list[str]:
    """``file imports name`` for each import of a forbidden package that is not allowed."""
    assert paths, "the rule would check nothing"
    return [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in paths
        for name in sorted(imports(path))
        if inside(name, *forbidden) and not inside(name, *allowed)
    ]


def below(*packages: str) -> list[Path]:
    """Sources of some packages or modules."""
    return [path for path in sources("k3_sglang", "agent_runtime") if inside(module_name(path), *packages)]


def test_the_agent_runtime_takes_only_chat_and_config_from_the_plugin_and_nothing_heavy() -> None:
    # No torch: sizes and token counts of images. The tower and the patches stay with the engine.
    eyes = ("k3_sglang.vision.config", "k3_sglang.vision.geometry", "k3_sglang.vision.images")
    allowed = ("k3_sglang.chat", "k3_sglang.config", *eyes)
    assert offenders(sources("agent_runtime"), *HEAVY, "k3_sglang", allowed=allowed) == []


def test_chat_config_announcements_and_launcher_import_nothing_heavy() -> None:
    light = ("k3_sglang.chat", "k3_sglang.config", "k3_sglang.announce", "k3_sglang.compat", "k3_sglang.launch")
    assert offenders(below(*light), *HEAVY) == []


def test_the_chat_format_knows_no_pictures_only_its_command_opens_some() -> None:
    format_only = [path for path in below("k3_sglang.chat") if module_name(path) != "k3_sglang.chat.__main__"]
    assert offenders(format_only, "PIL", "numpy", "k3_sglang.vision") == []


def test_upstream_names_are_imported_only_by_compat() -> None:
    others = [path for path in sources("k3_sglang") if module_name(path) != "k3_sglang.compat"]
    assert offenders(others, "sglang") == []


def test_kernels_and_layers_know_no_cache_and_no_entry_classes() -> None:
    assert offenders(below("k3_sglang.layers", "k3_sglang.kernels"), "k3_sglang.cache", "k3_sglang.models") == []


def test_kernels_are_arithmetic_only() -> None:
    forbidden = ("k3_sglang.compat", "k3_sglang.backends", "k3_sglang.layers", "k3_sglang.models")
    assert offenders(below("k3_sglang.kernels"), *forbidden) == []


def test_announcements_and_config_use_the_standard_library_only() -> None:
    for path in below("k3_sglang.announce", "k3_sglang.config"):
        assert {name.partition(".")[0] for name in imports(path)} <= set(sys.stdlib_module_names)


def test_the_decisions_of_the_cache_use_the_standard_library_only() -> None:
    names = ("types", "chances", "policy", "placement", "hints", "naming", "fanout", "metrics")
    decisions = [f"k3_sglang.cache.{name}" for name in names]
    for path in below(*decisions):
        foreign = {name for name in imports(path) if name.partition(".")[0] not in sys.stdlib_module_names}
        assert all(inside(name, *decisions) for name in foreign), path


def test_nothing_imports_the_launcher_or_the_gateway() -> None:
    packages = sources("k3_sglang", "agent_runtime")
    outside_launch = [path for path in packages if not inside(module_name(path), "k3_sglang.launch")]
    assert offenders(outside_launch, "k3_sglang.launch") == []
    # The ledger's command reads requests in the words of every protocol; the ledger itself knows none.
    allowed = ("agent_runtime.gateway", "agent_runtime.ledger.__main__")
    outside_gateway = [path for path in packages if not inside(module_name(path), *allowed)]
    assert offenders(outside_gateway, "agent_runtime.gateway") == []


@pytest.mark.parametrize(
    "module", ["k3_sglang", "k3_sglang.chat.encode", "k3_sglang.launch.__main__", "agent_runtime.gateway.app"]
)
def test_importing_a_light_module_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_every_source_file_begins_with_a_one_line_docstring() -> None:
    missing = []
    for path in sources("k3_sglang", "agent_runtime", "tests", "examples", "benchmarks", "clients", "scripts"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if not docstring or not docstring.splitlines()[0].strip():
            missing.append(str(path.relative_to(REPOSITORY)))
    assert missing == []


def test_files_and_functions_stay_below_their_limits() -> None:
    too_long = []
    for path in sources("k3_sglang", "agent_runtime", "examples", "benchmarks", "clients", "scripts"):
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(REPOSITORY))
        if (lines := len(text.splitlines())) > MAX_FILE_LINES:
            too_long.append(f"{name}: {lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    too_long.append(f"{name}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}")
    assert too_long == []


def test_no_file_names_a_path_of_one_machine() -> None:
    # Spelt in pieces so that this file does not name one either.
    machine = re.compile("|".join(f"(?<![\\w./~-])/{name}/" for name in ("work", "ro" + "ot", "home", "Users")))
    found = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(text.splitlines(), 1)
            if machine.search(line)
        ]
    assert found == []


@cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_engine_is_pinned_to_the_version_the_plugin_was_checked_on() -> None:
    assert pyproject()["project"]["optional-dependencies"]["serve"] == [f"sglang=={SGLANG_VERSION}"]


def test_the_preflight_looks_for_the_entry_points_that_are_declared() -> None:
    declared = pyproject()["project"]["entry-points"]
    assert {group: name for group, names in declared.items() for name in names} == ENTRY_POINTS


def test_a_light_install_needs_neither_torch_nor_the_engine() -> None:
    needed = {re.split(r"[^\w-]", requirement)[0] for requirement in pyproject()["project"]["dependencies"]}
    assert not needed & set(HEAVY)


@pytest.mark.parametrize("package", ["k3_sglang", "agent_runtime"])
def test_the_packages_declare_their_types(package: str) -> None:
    assert (REPOSITORY / package / "py.typed").is_file()


def script(name: str) -> ModuleType:
    """A module of scripts/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_files_is_current() -> None:
    file_tree = script("file_tree")
    page = (REPOSITORY / "docs" / "files.md").read_text(encoding="utf-8")
    assert file_tree.with_tree(page, file_tree.tree(REPOSITORY)) == page, "run `make format`"


def test_a_page_without_a_tree_block_is_refused() -> None:
    with pytest.raises(ValueError, match="no tree block"):
        script("file_tree").with_tree("# title\n", "x\n")


DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((REPOSITORY / "docs").glob("*.md"))),
)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_inside_the_repository_lead_somewhere(document: str) -> None:
    path = REPOSITORY / document
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_default_make_target_lists_every_target() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert targets is not None
    command = ["make", "--no-print-directory"]  # these tests may themselves run under make
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60).stdout
    assert [line.split()[1] for line in shown.splitlines()] == targets[1].split()


@pytest.mark.parametrize("name", sorted(path.name for path in (REPOSITORY / "configs").glob("*.yaml")))
def test_every_preset_is_accepted(name: str) -> None:
    path = REPOSITORY / "configs" / name
    settings = validate(read_file(path), source=name)
    assert settings.model_fields_set
    for line in path.read_text(encoding="utf-8").splitlines():
        if re.match(r"\s*[a-z_-]+: \S", line):
            assert " # " in line, f"{name}: a value without its reason: {line}"


def test_the_environment_of_the_clone_holds_every_requirement_once() -> None:
    wanted = script("environment").requirements(pyproject())
    assert len(wanted) == len(set(wanted))
    assert f"sglang=={SGLANG_VERSION}" in wanted
    assert any(requirement.startswith("pytest==") for requirement in wanted)


def test_the_environment_changes_its_name_with_the_requirements() -> None:
    environment = script("environment")
    assert environment.environment_key(["a"]) == environment.environment_key(["a"])
    assert environment.environment_key(["a"]) != environment.environment_key(["b"])


def test_an_environment_folder_that_cannot_be_made_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "environment.py")],
        env={**os.environ, "K3_VENV_DIR": str(tmp_path / "file" / "venvs")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "K3_VENV_DIR names another folder" in done.stderr


def test_an_installer_that_outlives_the_script_keeps_the_lock(tmp_path: Path) -> None:
    """Killed together with its lock, the script would let a second one delete the folder under a running installer."""
    code = (
        "import importlib.util, sys\n"
        "from pathlib import Path\n"
        "spec = importlib.util.spec_from_file_location('environment', sys.argv[1])\n"
        "environment = importlib.util.module_from_spec(spec); spec.loader.exec_module(environment)\n"
        "with environment.locked(Path(sys.argv[2])):\n"
        "    environment.run('sh', '-c', f'read line < {sys.argv[2]}.fifo')\n"
    )
    lock = tmp_path / "lock"
    os.mkfifo(f"{lock}.fifo")
    arguments = [sys.executable, "-c", code, str(REPOSITORY / "scripts" / "environment.py"), str(lock)]
    with subprocess.Popen(arguments) as process:
        with open(f"{lock}.fifo", "w", encoding="utf-8") as installer:  # opens when the installer reads
            process.kill()
            process.wait(30)
            with lock.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            installer.write("done\n")
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # returns once the installer has ended


def test_the_environment_home_is_outside_the_clone_and_can_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = script("environment")
    monkeypatch.setenv("K3_VENV_DIR", str(tmp_path))
    assert environment.environments_home() == tmp_path
    monkeypatch.delenv("K3_VENV_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert environment.environments_home() == tmp_path / "cache" / "k3-sglang" / "venvs"
