"""What the menu asks: whether something is meant, and what a new job is."""

import argparse
import shlex
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Static

from components.launchers import spec_fields
from components.launchers.spec import JobSpec
from pipelines.commands.job_options import FLAGS, specification
from trainer.base.errors import ConfigError

_CSS = """
{name} {{ align: center middle; }}
#dialog {{ width: 80%; max-width: 100; height: auto; max-height: 90%; border: thick $primary; padding: 0 2; }}
#dialog Horizontal {{ height: auto; }}
#dialog Button {{ margin: 1 2 0 0; }}
#dialog Label {{ width: 16; }}
#dialog Input {{ width: 1fr; }}
#problems {{ color: $error; height: auto; margin-top: 1; }}
"""

FIELDS = {
    "spec": ("Specification", "a file of YAML or JSON; what stands below wins"),
    **{name: (spec_fields.label(name), spec_fields.meaning(name)) for name in FLAGS},
    "words": ("Command", "python -m trainer launch -- train --config URI ..."),
}
"""What is asked for a job: the label, and a hint for an empty one."""


class Confirm(ModalScreen[bool]):
    """A question that is answered with yes or no.

    Args:
        question: the question.
    """

    CSS = _CSS.format(name="Confirm")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Lay the dialog out; what harms nobody has the focus."""
        with Vertical(id="dialog"):
            yield Static(self._question, markup=False)
            with Horizontal():
                yield Button("No (n)", id="no")
                yield Button("Yes (y)", id="yes", variant="error")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Take a button for an answer."""
        self.dismiss(event.button.id == "yes")

    def action_answer(self, answer: bool) -> None:
        """Take a key for an answer."""
        self.dismiss(answer)


class Submit(ModalScreen[JobSpec | None]):
    """A form that describes a job; it closes with a whole one or with none."""

    CSS = _CSS.format(name="Submit")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "Cancel")]

    def compose(self) -> ComposeResult:
        """Lay the form out."""
        with VerticalScroll(id="dialog", can_focus=False):
            for name, (label, hint) in FIELDS.items():
                with Horizontal():
                    yield Label(label)
                    yield Input(placeholder=hint, id=name, compact=True)
            yield Static(id="problems", markup=False)
            with Horizontal():
                yield Button("Submit", id="submit", variant="primary")
                yield Button("Cancel (esc)", id="cancel")

    def on_input_submitted(self) -> None:
        """Take Enter for the button."""
        self._finish()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Close the form, with a job or without."""
        if event.button.id == "submit":
            self._finish()
        else:
            self.dismiss(None)

    def action_cancel(self) -> None:
        """Close the form without a job."""
        self.dismiss(None)

    def _finish(self) -> None:
        texts = {name: self.query_one(f"#{name}", Input).value.strip() for name in FIELDS}
        try:
            self.dismiss(job_of_form(texts))
        except ConfigError as error:
            self.query_one("#problems", Static).update(str(error))


def job_of_form(texts: dict[str, str]) -> JobSpec:
    """Build a job from a form, as the command line does.

    Args:
        texts: texts by the names of FIELDS; empty ones are left out.

    Raises:
        ConfigError: naming every problem.
    """
    try:
        words = shlex.split(texts["words"])
    except ValueError as error:
        raise ConfigError(f"the command cannot be read: {error}", fix="close the quotes") from None
    flags = {name: texts[name] or None for name in FLAGS}
    return specification(
        argparse.Namespace(
            spec=texts["spec"],
            fields=[],
            env=[],
            mount=[],
            namespace=None,
            project="",
            arguments=words,
            **flags,
        )
    )
