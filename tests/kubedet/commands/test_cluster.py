"""`kubedet cluster manifests`."""

from pathlib import Path

ROOT = Path(__file__).parents[3]


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_writes_deploy(kubedet, tmp_path):
    code, out, _ = kubedet("cluster", "manifests", "-o", tmp_path / "a" / "deploy")
    assert (code, out) == (0, f"wrote {tmp_path}/a/deploy: see its README.md\n")
    assert files(tmp_path / "a" / "deploy") == files(ROOT / "deploy")


def test_what_is_there_is_left_alone(kubedet, tmp_path):
    folder = tmp_path / "deploy"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text("mine")
    code, _, err = kubedet("cluster", "manifests", "-o", folder)
    assert code == 2
    assert "already exists" in err and "choose another folder with -o" in err
    assert files(folder) == {"kustomization.yaml": b"mine"}
