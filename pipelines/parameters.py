"""The parameters of the pipeline, each told here and nowhere else.

The pipeline's signature, the descriptions in the compiled file, and the options of `kubedet submit`,
`schedule` and `run` follow from this table. Parameters that are fields of every training job (nodes,
processes, GPUs) are described with all fields of jobs: `components/launchers/spec.py`.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from components import jobs, launchers
from components.environment import CREDENTIALS, SIGNING
from components.launchers import spec
from operations.notifications import NOTIFY
from pipelines.forms import Form
from pipelines.sizes import DEFAULT, SIZES
from trainer.model import recipes

ELSEWHERE = "see the pipeline's parameters."
"""What a component says of an argument that is a parameter of the pipeline, and told here."""

REQUIRED = inspect.Parameter.empty
"""The default of a parameter that has none."""

_FORMS = {
    "volume": "with a volume", "conditional": "in the conditional form", "trials": "in a search",
}  # fmt: skip
"""Forms that have parameters of their own, in words."""

_CPU, _MEMORY = SIZES[DEFAULT]
_WORD = re.compile(r"`([^`\s]+|<[^`]+>)`")


@dataclass(frozen=True)
class Local:
    """What `kubedet run` has otherwise; what is empty is the same."""

    default: Any = None
    default_told: str = ""
    """The default in words, where it depends on the machine."""
    metavar: str = ""
    meaning: str = ""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the pipeline. Texts are Markdown, without capital and full stop."""

    name: str
    kind: type
    """str, int, float or dict, as Kubeflow has them."""
    meaning: str
    """What it is, for everybody who is asked for it."""
    default: Any = REQUIRED
    default_told: str = ""
    """What the default means, in words, where it is empty."""
    unasked: str = ""
    """What `kubedet submit` and `schedule` do where nobody gives it, if it is another thing."""
    metavar: str = ""
    """What stands for its value on a command line; empty: other options make it (--set, --job)."""
    choices: tuple[str, ...] = ()
    """All that it may be; the UI offers them as a list."""
    only: str = ""
    """The form that has it, as `Form` names it; empty is every form."""
    with_volume: Any = None
    """The default in the form with a volume, where that is another one."""
    trains: bool = True
    """Whether it means nothing to a pipeline that ends with the shards, or searches."""
    local: Local | None = None
    """`kubedet run` has only those that have this."""

    @property
    def option(self) -> str:
        """The option's name on a command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def description(self) -> str:
        """A sentence for the compiled file, which the UI shows."""
        empty = f"; empty is {self.default_told}" if self.default == "" and self.default_told else ""
        return f"{self.meaning}{empty}."

    def help(self) -> str:
        """Return what a command that sends a run to a cluster says of its option."""
        default_text = self.unasked or self.default_told
        if not default_text and self.with_volume:
            default_text = f"{_FORMS['volume']} {self.with_volume}"
        if not default_text and self.default is not REQUIRED:
            default_text = str(self.default)
        return _plain(self.meaning + (f" (default: {default_text})" if default_text else ""))

    def here(self) -> "Parameter":
        """Return the parameter as `kubedet run` has it."""
        local = self.local or Local()
        return replace(
            self,
            default=self.default if local.default is None else local.default,
            default_told=local.default_told or ("" if local.default else self.default_told),
            metavar=local.metavar or self.metavar,
            meaning=local.meaning or self.meaning,
            with_volume=None,
        )

    def within(self, form: Form) -> "Parameter":
        """Return the parameter as it is in a form."""
        return replace(self, default=self.with_volume) if form.volume and self.with_volume else self


def _plain(text: str) -> str:
    """Take the backquotes from single words: in a terminal they set off what has spaces."""
    return _WORD.sub(r"\1", text)


def _of_job(name: str, **settings: Any) -> Parameter:
    kind = int if spec.is_number(name) else str
    return Parameter(name, kind, spec.meaning(name), spec.default(name), metavar="N", **settings)


_ALL = (
    Parameter(
        "data_root", str,
        "URI under which data and runs are kept, e.g. `s3://bucket/kubedet`; every step must reach it",
        metavar="URI", with_volume=f"{jobs.VOLUME}/kubedet", trains=False,
        local=Local("./data_root", meaning="where data is kept: a folder or e.g. `s3://bucket/prefix`"),
    ),
    Parameter(
        "claim", str, f"PersistentVolumeClaim that every pod mounts at `{jobs.VOLUME}`",
        metavar="PVC", only="volume", trains=False,
    ),
    Parameter(
        "source", str,
        "images and boxes: `sample` (drawn by the program), `coco:URI`, `coco:2017`, `voc:URI`, "
        "`yolo:URI`, `openimages:`, or the URI or path of a COCO, VOC or YOLO folder",
        "sample", metavar="URI", trains=False, local=Local(),
    ),
    Parameter(
        "recipe", str, "a whole configuration; `kubedet recipes` lists them", "debug",
        metavar="NAME", choices=tuple(recipes.RECIPES), trains=False,
        local=Local(
            meaning="a whole configuration: a name (`kubedet recipes` lists them), or a file as "
            "`kubedet tune` writes it"
        ),
    ),
    Parameter(
        "overrides", dict, 'keys of the recipe and their values, e.g. `{"train.epochs": 10}`', {},
        trains=False, local=Local(),
    ),
    Parameter(
        "study", str, "name of the search; one of a name that is known goes on", "", "`tune-<recipe>`",
        only="trials", trains=False,
    ),
    Parameter(
        "space", str,
        "keys that are searched and what they may be, as YAML, e.g. `{train.lr: {low: 0.001, high: 0.1}}`",
        "", "the recipe's own", only="trials", trains=False,
    ),
    Parameter(
        "gate", str,
        "what a model must reach to be exported, e.g. `coco/AP50 >= 0.5`; several are parted by commas",
        "", "the recipe's", metavar="RULE", local=Local(),
    ),
    Parameter(
        "min_new_images", int,
        "end at once, as succeeded, where fewer images of the source are new, changed or gone since the "
        "current version of the model", 1, unasked="none: a run always trains", metavar="N",
        only="conditional",
        local=Local(0, "0: always train"),
    ),
    Parameter(
        "min_drift", float,
        "end at once too where the annotations have moved less than this since then, 0 to 1", 0.0,
        unasked="0: it does not matter", metavar="D", only="conditional",
        local=Local(),
    ),
    Parameter(
        "warm_start", str,
        "`champion` begins with the weights of the current version of the model, and trains a quarter of the "
        "recipe's epochs unless `train.epochs` is set", "", "none: as the recipe begins", metavar="FROM",
        local=Local(),
    ),
    Parameter(
        "prune", int,
        "how many of the newest runs are kept when the data are ready: older runs, versions, shards and "
        "images that nothing needs are deleted under the data root", 0, "0: all is kept", metavar="N",
        trains=False,
    ),
    Parameter(
        "launcher", str,
        "what trains: " + ", ".join(f"`{name}` ({it.meaning})" for name, it in launchers.LAUNCHERS.items()),
        launchers.DEFAULT, metavar="NAME", choices=tuple(launchers.LAUNCHERS),
    ),
    _of_job("nodes"),
    _of_job("nproc", local=Local(2, "one for each GPU; 2 without GPUs", meaning="training processes")),
    _of_job("gpus"),
    Parameter("image", str, "container image of the training", "", "the steps' own", metavar="IMAGE"),
    Parameter(
        "job", dict,
        'further fields of the training job (`kubedet job fields`), e.g. `{"memory_limit": "64Gi"}`', {},
    ),
    Parameter(
        "output", str, "URI of the run's folder", "", "`<data_root>/runs/<run id>`", metavar="URI",
        local=Local("./runs", metavar="DIR", meaning="where runs go"),
    ),
    Parameter(
        "credentials", str, "Secret with the object store's keys, none of which is required", CREDENTIALS,
        metavar="SECRET", trains=False,
    ),
    Parameter(
        "data_version", str, "name for the data as they are now; a known one brings its data back",
        "", "none", metavar="NAME", trains=False,
    ),
    Parameter(
        "step_cpu", str, "cores that the pods ask for that work on the data or the model, e.g. 2 or 500m",
        _CPU, unasked="the size's", metavar="CORES", trains=False,
    ),
    Parameter(
        "step_memory", str, "memory that they ask for, e.g. 8Gi",
        _MEMORY, unasked="the size's", metavar="AMOUNT", trains=False,
    ),
    Parameter(
        "signing", str,
        "Secret whose `private.pem` signs the exported model; the default one need not exist",
        SIGNING, metavar="SECRET",
    ),
    Parameter(
        "registry", str, "URL of the Kubeflow Model Registry that is told of the exported model", "", "none",
        metavar="URL",
    ),
    Parameter(
        "notify", str,
        "Secret whose `url` is the webhook that is told how the run ends; it need not exist",
        NOTIFY, metavar="SECRET", trains=False,
    ),
)  # fmt: skip

TABLE: Mapping[str, Parameter] = {item.name: item for item in _ALL}
"""The parameters by name."""

LOCAL: Mapping[str, Parameter] = {item.name: item.here() for item in _ALL if item.local}
"""Those of `kubedet run`, as it has them."""

TRAINING = tuple(item.name for item in _ALL if item.trains)
"""Names of those that mean nothing to a pipeline that ends with the shards, or searches."""


def of(form: Form) -> Iterator[Parameter]:
    """Yield the parameters that a form has, those without a default first."""
    of_form = [
        item.within(form)
        for item in TABLE.values()
        if not (item.only and not getattr(form, item.only))
        and not (item.trains and (form.until or form.trials))
    ]
    yield from sorted(of_form, key=lambda item: item.default is not REQUIRED)


def default(name: str, form: Form | None = None) -> Any:
    """Return a parameter's default in a form, by default the plain one; "" if there is none."""
    item = TABLE[name].within(form or Form())
    return "" if item.default is REQUIRED else item.default


def signature(form: Form) -> inspect.Signature:
    """Return the signature of the pipeline's function in a form, as Kubeflow's compiler reads it."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [inspect.Parameter(item.name, kind, default=item.default, annotation=item.kind) for item in of(form)]
    )


def docstring(purpose: str, form: Form) -> str:
    """Return the docstring of the pipeline's function in a form, from which the compiler has descriptions."""
    lines = [f"    {item.name}: {item.description}" for item in of(form)]
    return "\n".join([purpose, "", "Args:", *lines])
