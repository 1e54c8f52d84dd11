"""Overlays are complete, in one namespace and bound to the right account."""

import pytest

CLUSTER_SCOPED = ("SecurityContextConstraints", "MachineConfig")
ACCOUNTS = {
    "base": "pipeline-runner",
    "overlays/standalone": "pipeline-runner",
    "overlays/profile": "default-editor",
    "overlays/openshift": "pipeline-runner-dspa",
}
"""Who runs the steps of a pipeline."""


def by_name(objects):
    return {(item["kind"], item["metadata"]["name"]): item for item in objects}


def test_every_folder_builds(folder, build):
    objects = build(folder)
    assert len(by_name(objects)) == len(objects) > 0


def test_an_overlay_uses_one_namespace(folder, build):
    objects = [item for item in build(folder) if item["kind"] not in CLUSTER_SCOPED]
    spaces = {item["metadata"].get("namespace") for item in objects}
    if folder.name == "base":
        assert spaces == {None}
    else:
        assert len(spaces) == (1 if objects else 0)
        assert None not in spaces


@pytest.mark.parametrize("overlay", ACCOUNTS)
def test_the_launcher_role_is_bound_to_the_account_of_the_steps(overlay, build, deploy):
    objects = by_name(build(deploy / overlay))
    binding = objects["RoleBinding", "kubedet-launcher"]
    assert ("Role", binding["roleRef"]["name"]) in objects
    (account,) = binding["subjects"]
    assert (account["kind"], account["name"]) == ("ServiceAccount", ACCOUNTS[overlay])
    if overlay != "base":
        assert account["namespace"] == binding["metadata"]["namespace"]


def test_roles_that_are_bound_exist(folder, build, deploy):
    # The operators' Roles are applied beside an overlay, which brings the launcher's.
    roles = {name for kind, name in by_name(build(folder) + build(deploy / "base")) if kind == "Role"}
    bound = {item["roleRef"]["name"] for item in build(folder) if item["kind"] == "RoleBinding"}
    assert bound <= roles


@pytest.mark.parametrize("overlay", ACCOUNTS)
def test_overlays_apply_without_kubeflow_trainer(overlay, build, deploy):
    """kubectl applies nothing if one kind is unknown."""
    known = ("v1", "rbac.authorization.k8s.io/v1")
    assert {item["apiVersion"] for item in build(deploy / overlay)} <= set(known)


def test_overlays_contain_no_secret(folder, build):
    """Applying it again would overwrite the keys with placeholders."""
    assert "Secret" not in {item["kind"] for item in build(folder)}
