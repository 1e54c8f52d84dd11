"""`kubedet doctor`."""

import pytest


def test_all_is_well(kubedet, tmp_path):
    code, out, _ = kubedet("doctor", "--data-root", tmp_path)
    assert code == 0
    assert f"{tmp_path} is writable" in out
    assert out.endswith("\nall requirements of a run are met\n")


def test_missing_requirements_have_a_fix_and_exit_code_1(kubedet, served_cluster):
    served_cluster.denied.add(("list", "events"))
    code, out, _ = kubedet("doctor", "--credentials", "none")
    assert code == 1
    assert "missing  permissions on events: not allowed: list\n         fix: allow it" in out
    assert "missing  secret none: does not exist\n         fix: " in out
    assert out.endswith("\n2 missing\n")


def test_no_cluster_at_all_is_missing(kubedet, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, out, _ = kubedet("doctor")
    assert code == 1
    assert out.startswith("missing  cluster: ")


def test_this_machine_alone_is_looked_at(kubedet, served_cluster):
    code, out, _ = kubedet("doctor", "--local")
    assert code == 0
    assert "ok       packages: " in out
    assert not served_cluster.seen


@pytest.mark.parametrize(
    ("tag", "line"),
    [
        ("2.17.0", "ok       Kubeflow Pipelines: 2.17.0 at http"),
        ("", "warning  Kubeflow Pipelines: unknown version"),
        ("2.14.3", "missing  Kubeflow Pipelines: Kubeflow Pipelines 2.14.3 is too old"),
    ],
)
def test_the_version_of_kubeflow_pipelines_is_judged(kfp_server, kubedet, monkeypatch, tag, line):
    kfp_server.tag = tag
    code, out, _ = kubedet("doctor")  # KFP_ENDPOINT names it.
    assert line in out and code == int(line.startswith("missing"))
    monkeypatch.delenv("KFP_ENDPOINT")
    assert line in kubedet("doctor", "--host", kfp_server.url)[1]
    assert "Kubeflow Pipelines: not checked: neither --host nor KFP_ENDPOINT" in kubedet("doctor")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--local", "--claim", "c"], "local checks nothing in a cluster"),
        (["--local", "--namespace", "n"], "local checks nothing in a cluster"),
        (["--nodes", "0"], "nodes: "),
        (["--resource", "gpu=many"], "'gpu=many' is not NAME or NAME=N"),
        (["--resource", "=1"], "'=1' is not NAME or NAME=N"),
    ],
)
def test_bad_options_are_refused_before_anything_is_asked(kubedet, served_cluster, words, message):
    code, _, err = kubedet("doctor", *words)
    assert code == 2
    assert message in err
    assert not served_cluster.seen
