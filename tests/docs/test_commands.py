"""Commands and examples of README and docs.

Commands in code blocks that work on one machine within seconds are run, page by page, in a folder with the
files that the pages name. `PARSED` lists the others; their own parser checks them.
"""

import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import time
import tomllib
import zipfile
from contextlib import suppress
from inspect import signature
from itertools import chain
from pathlib import Path

import pytest
import typer
import yaml
from bundles import make_bundle
from kfp.cli.cli import cli as kfp
from PIL import Image

from components.environment import SECRET_KEYS
from components.launchers.job_options import read_job
from components.launchers.spec import build_spec
from kubedet import cli
from operations.tuning.space import parse_space
from pipelines import wait
from trainer.__main__ import _parser as trainer_parser
from trainer.config.parsing import parse_overrides
from trainer.data import sources
from trainer.evaluation import gate
from trainer.export import published_models
from trainer.model import recipes
from trainer.training.loop import train

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "deploy/README.md")
FILES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}

PARSED = {
    "--install-completion": "changes the settings of the user's shell",
    "run": "trains for minutes: tests/pipelines/test_run.py, tests/test_wheel.py",
    "tune --recipe": "trains for minutes: tests/operations/tuning",
    "serve": "serves until it is stopped: tests/trainer/export",
    "doctor": "asks a cluster: tests/kubedet/commands/test_doctor.py",
    "job": "needs a cluster: tests/kubedet/commands/test_job.py",
    "weights fetch": "needs the publisher: tests/kubedet/commands/test_recipes.py",
    "model verify cards --public-key": "needs a signed model: tests/trainer/export/test_tampered_bundle.py",
}
"""Beginnings of commands that are parsed but not run, and why."""

STAND_INS = {
    "s3://bucket/kubedet": "data_root",
    "coco:s3://bucket/set": "coco:set",
    "20261121-4f0c": "first",
}
"""Names on the pages, and what there is in their place."""

OTHERS = {
    "kubectl",
    "oc",
    "docker",
    "trtexec",
    "tritonserver",
    "mlnx_qos",
    "ethtool",
    "grep",
    "cp",
    "source",
}
"""Programs that are not part of this project; files of the repository that they read must exist."""

TOOLS = {"kubedet", "python", "kfp", "git", "make", "pip", "export", "openssl", "tar", "eval", *OTHERS}
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_INNER = re.compile(r"\$\((.*?)\)")


def code(text):
    """Yield the lines of code blocks that may hold commands: indented, or with the language bash."""
    language = None
    for line in re.sub(r" \\\n\s*", " ", text).splitlines():
        if line.lstrip().startswith("```"):
            language = line.strip("` ") if language is None else None
        elif language == "bash" or (language is None and line.startswith("    ")):
            yield line.strip()


def commands(text, *tools):
    """Yield the words of the commands of some programs."""
    variables = {}
    for line in code(text):
        for part in [*line.split(" && "), *_INNER.findall(line)]:
            filled = _INNER.sub("VALUE", part)
            for name, value in variables.items():
                filled = filled.replace(f"${name}", value)
            try:
                words = shlex.split(filled, comments=True)
            except ValueError:  # Output of a program.
                continue
            while words and (found := _VARIABLE.fullmatch(words[0])):
                variables[found[1]] = found[2]
                words = words[1:]
            tool = words[0].rpartition("/")[2] if words else ""
            if tool in (tools or TOOLS):
                yield [tool, *words[1:]]


def is_parsed(words):
    line = " ".join(words[1:])
    return any(line.startswith(name) for name in PARSED) and not line.startswith(("job fields", "job render"))


def pages_with(*tools):
    return [page for page, text in PAGES.items() if any(commands(text, *tools))]


@pytest.fixture(scope="session")
def finished(made_once, data_root, shards, tiny):
    """A folder with a data root, two runs, and a model `cards` in two versions."""

    def make(folder):
        shutil.copytree(data_root, folder / "data_root")
        root, uri = folder / "data_root", shards.replace(data_root, str(folder / "data_root"))
        first = root / "runs/first"
        train(tiny(train__epochs=1), uri, str(first / "train"))
        categories = json.loads(Path(uri, "index.json").read_text())["categories"]
        classes = [{"id": i, "name": it["name"], "original_id": it["id"]} for i, it in enumerate(categories)]
        for number, name in enumerate(("first", "a"), 1):
            bundle = make_bundle(
                root / "runs" / name / "model", version=f"v{number}", name="cards", classes=classes
            )
            published_models.publish(bundle, str(root), "cards")
        scored = ["--shards", uri, "-o", str(first / "evaluation")]
        assert cli.main(["evaluate", str(first / "train/best.pt"), *scored]) == 0
        for name, made in (("first", "first"), ("second", "first"), ("a", "a")):
            shutil.copytree(root / "runs" / made, folder / "runs" / name)

    return made_once("finished_for_docs", make)


@pytest.fixture
def folder(finished, tmp_path, monkeypatch):
    """A copy of that folder, with the other files that the pages name."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    (index,) = Path("data_root/shards").glob("*/index.json")
    monkeypatch.setitem(STAND_INS, "data_root/shards/0123abcd", str(index.parent))
    picture = io.BytesIO()
    Image.new("RGB", (192, 96), "white").save(picture, "JPEG")
    boxes = json.dumps(
        {
            "images": [{"id": 1, "file_name": "b.jpg", "width": 192, "height": 96}],
            "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [20, 10, 9, 9]}],
            "categories": [{"id": 1, "name": "ace"}],
        }
    )
    packed = {
        "cards.zip": {
            "data.yaml": "names: [ace]\ntrain: images\n",
            "labels/a.txt": "0 0.5 0.5 0.5 0.5\n",
            "images/a.jpg": picture.getvalue(),
        },
        "corrections.zip": {"annotations/instances_train.json": boxes, "images/b.jpg": picture.getvalue()},
    }
    for name, files in packed.items():
        with zipfile.ZipFile(name, "w") as archive:
            for file, content in files.items():
                archive.writestr(file, content)
    for name in ("mine", "set", "pets"):
        write(f"{name}/annotations/instances_train.json", boxes.encode())
        write(f"{name}/images/b.jpg", picture.getvalue())
    for name in ("photo.jpg", "photos/new.jpg", "images/a.jpg"):
        write(name, picture.getvalue())
    write("runs/tune-small/best.yaml", blocks("tuning", "yaml")[1].encode())
    write("job.yaml", b"name: a\nimage: i:1\ncommand: ['true']\n")
    Path("deploy").symlink_to(ROOT / "deploy")
    return tmp_path


def write(name, content):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This client only works")
@pytest.mark.parametrize("page", pages_with("kubedet", "kfp", "openssl", "tar"))
def test_commands_run(page, folder, kfp_server, monkeypatch, capsys):
    monkeypatch.setattr(wait, "POLL_SECONDS", 0.0)
    monkeypatch.delenv("KUBEDET_SIGNING_KEY", raising=False)
    for tool, *words in commands(PAGES[page], "kubedet", "kfp", "openssl", "tar"):
        if tool == "kfp":  # As its console script calls it; a mistake is an exception.
            kfp.main(words, obj={}, auto_envvar_prefix="KFP", standalone_mode=False)
        elif tool != "kubedet":
            subprocess.run([tool, *stand_ins(words)], check=True, capture_output=True)
        elif words[1:] == ["--help"]:
            with suppress(SystemExit):
                assert cli.main(words) == 0
        elif is_parsed([tool, *words]):
            check(stand_ins(words))
        else:
            remote = words[0] in ("submit", "schedule")
            code = cli.main(words if remote else stand_ins(words))
            is_rejected = code == 1 and "--gate" in words  # By the gate.
            assert code == 0 or is_rejected, (words, capsys.readouterr().err)


def stand_ins(words):
    for name, value in STAND_INS.items():
        words = [word.replace(name, value) for word in words]
    return words


def check(words):
    """Parse a command, and check its source, recipe, keys and job."""
    command, rest = typer.main.get_command(cli.make_app()), list(words)
    if words[0].startswith("--"):
        assert words[0] in {flag for item in command.params for flag in item.opts}
        return
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    context = command.make_context("kubedet", rest)
    if words[0] in ("run", "tune"):
        sources.parse(context.params["source"])
        recipes.load(
            recipes.read_recipe(context.params["recipe"])[0], parse_overrides(context.params["overrides"])
        )
    if words[:2] == ["job", "submit"]:
        names = signature(read_job).parameters
        read_job(**{name: value for name, value in context.params.items() if name in names})


@pytest.mark.parametrize("page", pages_with("python", "make", "pip", *OTHERS))
def test_other_commands_name_what_exists(page):
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for tool, *words in commands(PAGES[page], "python", "make", "pip", *OTHERS):
        if tool == "make":
            assert {word for word in words if word.islower() and "=" not in word} <= {*targets}, words
        elif tool == "pip":
            pass  # See below.
        elif words[:2] == ["-m", "trainer"] and "--help" not in words:
            trainer_parser().parse_args(words[2:])
        elif words[:1] == ["-m"] and words[1].startswith("benchmarks"):
            own = (ROOT / "benchmarks" / f"{words[1][11:] or '__main__'}.py").read_text()
            shared = re.findall(r"^from benchmarks\.(\w+) import", own, re.MULTILINE)
            known = own + "".join((ROOT / "benchmarks" / f"{name}.py").read_text() for name in shared)
            options = [word for word in words if word.startswith("--")]
            assert all(f'"{word}"' in known or f"{word[2:]}=" in known for word in options), words
        else:
            paths = [word for word in words if re.match(r"(deploy|tests|images)/", word)]
            assert all((ROOT / path).exists() for path in paths), words


def test_pip_installs_what_exists():
    """A checkout with extras that it has, or packages of other projects: no index has kubedet."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    others = pinned | {"tensorrt", "polygraphy", "nvidia-modelopt[onnx]"}
    text = "\n".join([*PAGES.values(), (ROOT / "docs/quickstart.ipynb").read_text()])
    installs = re.findall(r"pip install ((?:-e )?[^\s`\"#]+)", text)
    assert len(installs) >= 5
    for name in (words.removeprefix("-e ").strip("'") for words in installs):
        path, _, chosen = name.rstrip("]").partition("[")
        assert (
            path in (".", "./kubedet") and set(filter(None, chosen.split(","))) <= {*extras}
        ) or name in others, name


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.timeout(3600)
def test_the_first_commands_of_the_readme_work_in_a_fresh_clone(tmp_path):
    """With the packages of this environment: a second one of 8 GB would fill small disks."""
    clone, run, test = list(commands(PAGES["README.md"], "git", "make"))[:3]
    assert clone[:3] == ["git", "clone", "REPOSITORY"]
    subprocess.run(["git", "clone", "--quiet", ROOT, *clone[3:]], cwd=tmp_path, check=True)
    folder = tmp_path / clone[3]
    environment = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    environment["PYTHONPATH"] = sysconfig.get_path("purelib")  # pip takes them for installed.
    began = time.monotonic()
    # The whole suite is what runs this test.
    for words in (run, [*test, "ARGS=tests/trainer/config"]):
        ended = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        print(f"{' '.join(words)}: {time.monotonic() - began:.0f} s since the clone")
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    # On a busy machine the gate may hold the model back.
    assert (folder / "runs/first/evaluation/report.html").exists()
    for line in ("make test", "make lint"):
        assert f"\n{line}\n" in (ROOT / ".ci/run").read_text()


def known_options():
    """Return the options of each command by its words."""
    flags = {(group,): set() for group in cli.GROUPS}
    for name, entry in cli.COMMANDS.items():
        options = chain(*cli.command_options(entry).values())
        flags[tuple(name.split())] = {flag for option in options for flag in option.flags}
    return flags


def test_commands_in_sentences_exist_and_know_their_options():
    known = known_options()
    for page, text in PAGES.items():
        for names, rest in re.findall(r"`kubedet ((?:[a-z]+ ?)+)([^`\n]*)`", text):
            words = tuple(names.split())
            command = max((key for key in known if words[: len(key)] == key), key=len, default=None)
            assert command, f"{page}: there is no kubedet {names}"
            options = set(re.findall(r"(?<=\s)(--?[a-z][a-z-]*)", " " + rest.split(" -- ")[0]))
            assert options <= known[command], (page, command, options)


def test_the_reference_is_current():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/site/reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.reference() == PAGES["docs/reference.md"], "run `python docs/site/reference.py`"


def test_every_source_and_key_of_a_store_is_documented():
    listed = re.findall(r"^    (\w+)[: ]", sources.__doc__, re.MULTILINE)
    assert [name for name in listed if f"`{name}" not in PAGES["docs/data.md"] and name != "PATH"] == []
    keys = {*SECRET_KEYS, *SECRET_KEYS.values()}
    assert keys <= set(re.findall(r"`(\w+)`", PAGES["docs/kubeflow.md"]))


def test_examples_of_files_are_valid(tmp_path):
    for block in blocks("networks", "yaml"):
        build_spec({"command": ["true"]} | yaml.safe_load(block))
    space, recipe = blocks("tuning", "yaml")
    parse_space(space, "small", {}, "the example")
    (tmp_path / "best.yaml").write_text(recipe)
    assert recipes.read_recipe(str(tmp_path / "best.yaml"))[0] == "small"
    rules = re.findall(r"^\| `([^`]+[<>]=?[^`]+)` \|", PAGES["docs/evaluation.md"], re.MULTILINE)
    assert len(rules) == 5 and all(str(gate.parse_rule(rule)) == rule for rule in rules)


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", PAGES[f"docs/{page}.md"], re.DOTALL)


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    """A folder with a bundle that finds one dog in every image."""
    monkeypatch.chdir(tmp_path)
    published_models.publish(make_bundle(tmp_path / "runs/a/model", name="cards"), "data_root", "cards")
    (tmp_path / "images").mkdir()
    Image.new("RGB", (192, 96), "white").save(tmp_path / "images/a.jpg")


def test_code_that_calls_a_model_works(bundle, capsys):
    (text,) = blocks("serving", "python")
    exec(compile(text, "docs/serving.md", "exec"), {"__name__": "guide"})
    assert re.match(r"dog <b> 0\.72\d* \[24\. 12\. 96\. 60\.\]", capsys.readouterr().out.strip())
