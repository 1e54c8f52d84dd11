"""Import rules between packages, and dependencies that must stay optional."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from installed import needed
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "kubedet": {"kubedet", "pipelines", "operations", "components", "trainer"},
    "trainer": {"trainer"},
    "components": {"components", "trainer"},
    "operations": {"operations", "components", "trainer"},
    "pipelines": {"pipelines", "operations", "components", "trainer"},
}
MLMD = re.compile(r"\bKFP_MLFLOW_|METADATA_(GRPC|STORE)|metadata-grpc|ml_metadata")
MLFLOW = re.compile(r"\bMLFLOW_[A-Z]")
FILES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))

LAYERS = (
    ("base", {"base"}),
    ("storage", {"storage"}),
    ("processes", {"launching"}),
    ("configuration", {"config"}),
    ("trackers", {"trackers"}),
    ("data", {"data", "weights"}),
    ("model", {"model"}),
    ("metrics", {"evaluation"}),
    ("report", {"report"}),
    ("training", {"training"}),
    ("export", {"export"}),
    ("evaluators", {"evaluators"}),
    ("steps", {"steps"}),
    ("program", {"__main__"}),
)
"""The packages of trainer, lowest first: each imports only from earlier layers. docs/architecture.md has the
same table."""


def imports(path):
    """Top-level packages that a file imports anywhere, function bodies included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0]


def test_packages_import_only_packages_below_them():
    forbidden = {
        str(path.relative_to(ROOT)): found
        for path in FILES
        if (found := set(imports(path)) & set(MAY_IMPORT) - MAY_IMPORT[path.relative_to(ROOT).parts[0]])
    }
    assert not forbidden


UNITS = {unit for _, units in LAYERS for unit in units}


def unit_of(name):
    return name.partition(".")[0]


def trainer_imports(root):
    """Every import between units of trainer: (where, importer, imported)."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        package, own = ["trainer", *parts[:-1]], unit_of(".".join(parts))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                names = [f"{base}.{alias.name}" for alias in node.names]
            else:
                continue
            units = {unit_of(name.removeprefix("trainer.")) for name in names if name.startswith("trainer.")}
            for unit in units - {own}:
                yield f"{path.relative_to(root)}:{node.lineno}", own, unit


def upward(root):
    height = {unit: number for number, (_, units) in enumerate(LAYERS) for unit in units}
    return [
        f"{where}: {importer} imports {imported}"
        for where, importer, imported in trainer_imports(root)
        if importer != "__init__" and height[imported] >= height[importer]
    ]


def test_every_package_of_trainer_has_one_layer():
    paths = [path for path in (ROOT / "trainer").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))]
    packages = sorted(path.stem for path in paths if path.name != "__init__.py")
    assert packages == sorted(UNITS)
    assert all((path / "__init__.py").exists() for path in paths if path.is_dir())


def test_trainer_imports_lead_to_lower_layers():
    assert not upward(ROOT / "trainer")


ARCHITECTURES = ("trainer", "model", "architectures")


def reached_into(root):
    """Imports of an architecture's network from outside its file or folder; options and recipes are free."""
    for path in sorted(root.rglob("*.py")):
        own = ("trainer", *path.relative_to(root).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                parts = tuple(name.split("."))
                inside = parts[:3] == ARCHITECTURES and len(parts) > 3
                options = any(part.endswith("_options") for part in parts)
                if inside and not options and own[:4] != parts[:4]:
                    yield f"{path.relative_to(root)}: {name}"


def test_only_an_architecture_imports_its_own_network():
    assert not list(reached_into(ROOT / "trainer"))


def test_the_architecture_document_has_these_layers():
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## The layers of trainer")[2]
    rows = re.findall(r"^\| (\w+) \| (`.*?) \|", text.partition("\n## ")[0], re.MULTILINE)
    assert [(name, set(re.findall(r"`([\w.]+)/?`", units))) for name, units in rows] == list(LAYERS)


@pytest.mark.slow
def test_no_module_needs_ml_metadata_or_trackers():
    """Kubeflow Pipelines drops ML Metadata after 2.17, and may set MLflow's variables in pods."""
    tracking = {*(ROOT / "trainer" / "trackers").glob("*.py"), ROOT / "components" / "environment.py"}
    for path in FILES:
        assert "ml_metadata" not in imports(path), path
        assert not set(imports(path)) & {"mlflow", "wandb"} or path in tracking, path
        texts = [
            node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
        ]
        texts = [text for text in texts if isinstance(text, str)]
        assert not [text for text in texts if MLMD.search(text)], path
        assert path.name == "schema.py" or path in tracking or not any(map(MLFLOW.search, texts)), path


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False)


@pytest.mark.slow
def test_trainer_runs_without_kfp_and_kubeflow_training():
    code = """
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("kfp", "kubeflow", "kubernetes", "components", "operations", "pipelines"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Refuse())
import trainer
for module in pkgutil.walk_packages(trainer.__path__, "trainer."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from trainer.__main__ import main
try:
    main(["--help"])
except SystemExit as end:
    print("help", end.code)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "help 0" in done.stdout


WINDOWS = """
import os, platform, shlex, signal, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(","), None))
absent = {
    os: "fork register_at_fork getuid getgid O_CLOEXEC O_NOFOLLOW sched_getaffinity killpg setsid pread",
    signal: "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGPIPE pthread_sigmask setitimer",
}
for module, names in absent.items():
    for name in names.split():
        delattr(module, name)
platform.system = lambda: "Windows"
from kubedet.cli import main
for line in sys.stdin.read().splitlines():
    sys.stdin = open(os.devnull)
    sys.stderr = sys.stdout
    try:
        code = main(shlex.split(line))
    except SystemExit as end:
        code = end.code
    print(f"code {code}\\0", end="")
"""
TRAINING = "'.[train]'"
RUN = "--data-root s3://bucket/root --source"
COMMANDS = {
    f"submit --dry-run {RUN} openimages:subset=mlperf": (0, "source=openimages:subset=mlperf"),
    f"submit --dry-run {RUN} sample:images=two": (2, "cannot use 'images=two'"),
    f"schedule create --cron '0 2 * * *' --dry-run {RUN} coco:2017": (0, "source=coco:2017"),
    f"submit --trials 2 --dry-run {RUN} coco:2017": (0, "source=coco:2017"),
    "cluster compile -o pipeline.yaml": (0, "wrote pipeline.yaml"),
    "job render --name x --image y -- python": (0, "kind: PyTorchJob"),
    "job menu": (2, "the menu needs a terminal"),
    "doctor": (1, "missing  cluster"),
    "doctor --local": (1, "training requires Linux"),
    "recipes list": (0, "coco_r50"),
    "run --help": (0, "--recipe"),
    "run": (2, TRAINING),
    "tune": (2, TRAINING),
    "data inspect x": (2, TRAINING),
    "predict x y -o z": (2, TRAINING),
    "serve x": (2, TRAINING),
}
"""Commands of an installation without extras, the exit code, and what they print."""
KUBECONFIG = """
current-context: none
contexts: [{name: none, context: {cluster: none, user: none}}]
clusters: [{name: none, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: none, user: {}}]
"""


@pytest.mark.slow
def test_the_client_needs_neither_packages_for_training_nor_unix(tmp_path):
    only = needed(["train"]) - needed(["client"])
    absent = [
        module
        for module, names in metadata.packages_distributions().items()
        if {canonicalize_name(name) for name in names} <= only
    ]
    assert {"torch", "pyarrow", "matplotlib", "numpy", "PIL"} <= set(absent)
    absent += ["fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"]
    (tmp_path / "config").write_text(KUBECONFIG)
    ran = subprocess.run(
        [sys.executable, "-c", WINDOWS, ",".join(absent)],
        input="\n".join(COMMANDS),
        env={"PYTHONPATH": str(ROOT), "KUBECONFIG": str(tmp_path / "config"), "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    outputs = dict(zip(COMMANDS, ran.stdout.split("\0"), strict=False))
    for line, (code, text) in COMMANDS.items():
        assert outputs[line].endswith(f"code {code}") and text in outputs[line], (line, outputs[line])


@pytest.mark.parametrize("module", ["kubedet", "trainer.steps.train", "components.training"])
def test_pipeline_modules_import_fast_and_without_torch(module):
    code = f"import time; start = time.process_time(); import {module}, sys; "
    code += "print('torch' in sys.modules, time.process_time() - start)"
    done = run(code)
    torch_there, seconds = done.stdout.split()
    assert torch_there == "False"
    # CPU seconds: wall time depends on what else the machine does.
    assert float(seconds) < 10
