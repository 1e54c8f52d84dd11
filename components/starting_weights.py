"""What a training starts from: named weights, or those that its recipe takes where they are to be had."""

from typing import Any

from trainer.base.errors import StorageError
from trainer.model import recipes
from trainer.weights.weights_mirror import look_up, obtain

WEIGHTS = "model.weights"
WIDTH = "model.backbone_width"
NETWORK = ("model.architecture", "model.backbone", "model.norm", WEIGHTS, WIDTH)
"""Keys of which whoever sets one chooses for himself what the training starts from."""


def secure(recipe: str, overrides: dict[str, Any], data_root: str) -> None:
    """See to it, before hours of work, that a training finds its weights and that they fit.

    Those that a recipe takes by itself are fetched where they can be; where not, a line says so.

    Args:
        recipe: name of a recipe.
        overrides: dotted configuration keys and their values.
        data_root: see `trainer.weights.weights_mirror.obtain`.

    Raises:
        CheckpointError, ConfigError, StorageError: weights that are named cannot be had, or do not fit.
    """
    config = recipes.load_here(recipe, overrides)
    if uri := _by_itself(recipe, overrides):
        try:
            obtain(uri, data_root)
        except StorageError:
            print(
                f"no weights to be had: {recipe} trains from scratch; to use them `kubedet weights fetch "
                f"{recipe}` where there is internet, or --set {WEIGHTS}=PATH", flush=True,
            )  # fmt: skip
            return
    if uri or config.model.weights:
        from trainer.model.pretrained import check_pretrained  # PyTorch, which takes seconds to start.

        values = overrides | chosen(recipe, overrides, data_root)
        check_pretrained(recipes.load(recipe, values).model, data_root)


def chosen(recipe: str, overrides: dict[str, Any], data_root: str) -> dict[str, Any]:
    """Return dotted keys and values, of those not set, that follow from the weights of a recipe for any.

    Args:
        recipe: see `secure`.
        overrides: see `secure`.
        data_root: in whose mirror those are that the recipe takes by itself: it fetches nothing more.

    Raises:
        CheckpointError, ConfigError, StorageError: weights that are named cannot be had.
    """
    by_itself = _by_itself(recipe, overrides)
    if by_itself and not look_up(by_itself, data_root).complete:
        return {}
    uri = by_itself or recipes.load(recipe, overrides).model.weights
    if recipe not in recipes.WITH_WEIGHTS or not uri or "model.architecture" in overrides:
        return {}
    from trainer.model.upstream_fitting import width_of  # PyTorch, as above.

    values = recipes.WITH_WEIGHTS[recipe] | {WEIGHTS: uri}
    try:
        width = width_of(obtain(uri, data_root).state())
    except StorageError:
        if by_itself:  # Damaged, and not to be had again.
            return {}
        raise
    # Networks of any width can be saved, also one that this recipe has trained.
    values |= {WIDTH: width} if width else {}
    return {key: value for key, value in values.items() if key not in overrides}


def _by_itself(recipe: str, overrides: dict[str, Any]) -> str:
    """Return the published weights that a recipe takes where nobody chose; empty for none."""
    own = recipes.WITH_WEIGHTS.get(recipe, {})
    return "" if overrides.keys() & set(NETWORK) else own.get(WEIGHTS, "")
