"""The menu: the jobs of a namespace, always up to date, and what can be done with them."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.timer import Timer
from textual.widgets import DataTable, Footer, Header, Static

from components.launchers.backend import JobStatus, PodStatus
from components.launchers.spec import JobSpec
from pipelines.commands import job_tables
from pipelines.menu.dialogs import Confirm, Submit
from trainer.base.errors import KubedetError

if TYPE_CHECKING:
    from components.launchers.cluster.backend import ClusterBackend

SHELL = ("sh", "-c", "if command -v bash >/dev/null; then exec bash; else exec sh; fi")
"""What is run in a pod: the better shell that its image has."""


_PHASE_STYLES = {
    "running": "green", "succeeded": "green", "pending": "yellow", "restarting": "yellow",
    "suspended": "yellow", "failed": "bold red",
}  # fmt: skip
"""Of jobs, and of pods, which Kubernetes writes with a capital."""


class Menu(App[KubedetError]):
    """The jobs above, the pods of the chosen one below.

    What talks to the cluster does so in threads of its own, which nobody waits for at the end.

    Args:
        connect: returns the cluster; called in a thread. The menu ends with the KubedetError that it raises.
        refresh_seconds: between two looks at the jobs.
    """

    TITLE = "kubedet"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #jobs { height: 1fr; }
    #pods { height: auto; max-height: 40%; border-top: solid $primary; }
    #details { height: auto; max-height: 20%; padding: 0 1; }
    #done { height: auto; max-height: 30%; padding: 0 1; display: none; background: $success-muted; }
    #done.failed { background: $error-muted; }
    #done.shown { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "submit", "Submit"),
        Binding("l", "logs", "Logs"),
        Binding("e", "shell", "Shell in a pod"),
        Binding("d", "delete", "Delete"),
        Binding("tab", "focus_next", "Jobs/pods"),
        Binding("q", "quit", "Quit"),
    ]

    @dataclass
    class Listed(Message):
        """The jobs as they are now, or why they are not known."""

        jobs: list[JobStatus]
        error: str = ""

    @dataclass
    class Done(Message):
        """Something that was asked for has been done, or has not."""

        text: str
        failed: bool = False

    _backend: "ClusterBackend"
    """Set before there are jobs, and before anything is done in the background."""

    def __init__(self, connect: "Callable[[], ClusterBackend]", refresh_seconds: float = 3.0) -> None:
        super().__init__()
        self._connect = connect
        self._connected = threading.Event()
        self._refresh_seconds = refresh_seconds
        self._jobs: dict[str, JobStatus] = {}
        self._look = threading.Event()
        self._closed = False
        self._fading: Timer | None = None

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield Header(icon="")
        yield DataTable(id="jobs", cursor_type="row")
        yield DataTable(id="pods", cursor_type="row")
        yield Static("connecting to the cluster ...", id="details", markup=False)
        yield Static(id="done", markup=False)  # Not a toast, which would lie over the tables.
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look at the jobs."""
        self.query_one("#jobs", DataTable).add_columns(*job_tables.JOBS)
        self.query_one("#pods", DataTable).add_columns(*job_tables.PODS)
        threading.Thread(target=self._watch, daemon=True).start()

    def on_unmount(self) -> None:
        """Look no more."""
        self._closed = True
        self._look.set()

    def _gone(self) -> bool:
        """Whether the screen is being taken down: what was asked for may be answered after that."""
        return not all(self.query(name) for name in ("#jobs", "#pods", "#details", "#done"))

    def _watch(self) -> None:
        try:
            self._backend = self._connect()
        except KubedetError as error:
            self.call_later(self.exit, error)
            return
        self._connected.set()
        self.call_later(setattr, self, "sub_title", f"namespace {self._backend.cluster.namespace}")
        while not self._closed:
            self._look.clear()
            try:
                jobs = [self._backend.with_progress(job) for job in self._backend.list_jobs()]
                self.post_message(self.Listed(jobs))
            except KubedetError as error:
                self.post_message(self.Listed([], str(error)))
            self._look.wait(self._refresh_seconds)

    def on_menu_listed(self, message: Listed) -> None:
        """Show the jobs; a cluster that does not answer leaves those that were seen last."""
        if self._gone():
            return
        if message.error:
            self.query_one("#details", Static).update(message.error)
            return
        self._jobs = {job.name: job for job in job_tables.newest(message.jobs)}
        rows = {job.name: job_tables.row(job) for job in self._jobs.values()}
        _fill(self.query_one("#jobs", DataTable), rows)
        self._show_chosen()

    def on_data_table_row_highlighted(self) -> None:
        """Show the pods of the job that the cursor is on."""
        self._show_chosen()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Take Enter for the first thing that people want: the log of the job, or of the one pod."""
        job, pod = self._job(), self._pod()
        if event.data_table.id == "pods" and job and pod:
            self._logs(job, "--pod", pod.name)
        else:
            self.action_logs()

    def _show_chosen(self) -> None:
        if self._gone():
            return
        job = self._job()
        pods = sorted(job.pods, key=lambda pod: pod.rank) if job else []
        _fill(self.query_one("#pods", DataTable), {pod.name: job_tables.pod_row(pod) for pod in pods})
        text = "\n".join(job_tables.state_lines(job)) if job else "no jobs here yet: press s to submit one"
        self.query_one("#details", Static).update(text)

    def _job(self) -> JobStatus | None:
        return self._jobs.get(_chosen(self.query_one("#jobs", DataTable)))

    def _pod(self) -> PodStatus | None:
        job, name = self._job(), _chosen(self.query_one("#pods", DataTable))
        return next((pod for pod in job.pods if pod.name == name), None) if job else None

    def action_submit(self) -> None:
        """Ask for a job and start it."""

        def start(job: JobSpec | None) -> None:
            if job:
                self._in_background(lambda: f"submitted {self._backend.submit(job)}")

        self.push_screen(Submit(), start)

    def action_delete(self) -> None:
        """Delete the chosen job, if that is meant."""
        job = self._job()
        if job is None:
            return
        name = job.name

        def delete(meant: bool | None) -> None:
            if meant:
                self._in_background(lambda: self._delete(name))

        question = f"Delete {name}, which is {job.phase}, and its pods? Its checkpoints stay."
        self.push_screen(Confirm(question), delete)

    def _delete(self, name: str) -> str:
        self._backend.stop(name)
        return f"deleted {name}"

    def action_logs(self) -> None:
        """Show the log of the chosen job on the ordinary terminal, until its end or Ctrl-C."""
        job = self._job()
        if job:
            self._logs(job)

    def _logs(self, job: JobStatus, *words: str) -> None:
        """Show a log: of a job that goes on as it comes, of one that has ended as it is now."""
        if not job.phase.final:
            self._run("logs", "--follow", job.name, *words, leave="Ctrl-C leaves the log; the job goes on")
        elif job.pods:
            self._run("logs", job.name, *words)
        else:
            self._tell(f"{job.name} is {job.phase}, and its pods are gone with their logs", failed=True)

    def action_shell(self) -> None:
        """Open a shell in the chosen pod."""
        job, pod = self._job(), self._pod()
        if job and pod:
            self._run(
                "exec", job.name, "--pod", pod.name, "--", *SHELL, leave="exit or Ctrl-D leaves the shell"
            )

    def _run(self, verb: str, *words: str, leave: str = "") -> None:
        """Run `kubedet job VERB` on the ordinary terminal, where people can scroll and copy.

        Args:
            verb: the command.
            words: its arguments.
            leave: how to end it before its end.
        """
        command = ["-P", "-m", "pipelines.cli", "job", verb, "--namespace", self._backend.cluster.namespace]
        with self.suspend():
            # Ctrl-C is the command's: it ends that, not the menu. (A handler is not inherited, SIG_IGN is.)
            before = signal.signal(signal.SIGINT, lambda *_: None)
            try:
                if leave:
                    print(f"-- {leave} --", flush=True)
                subprocess.run([sys.executable, *command, *words], check=False)
                print("\n-- press Enter for the menu --", end="", flush=True)
                sys.stdin.readline()
            finally:
                signal.signal(signal.SIGINT, before)
        self._look.set()

    def _in_background(self, work: Callable[[], str]) -> None:
        def run() -> None:
            self._connected.wait()
            try:
                self.post_message(self.Done(work()))
            except KubedetError as error:
                self.post_message(self.Done(str(error), failed=True))

        threading.Thread(target=run, daemon=True).start()

    def on_menu_done(self, message: Done) -> None:
        """Tell what has been done, and look at the jobs at once."""
        self._tell(message.text, failed=message.failed)
        self._look.set()

    def _tell(self, text: str, *, failed: bool = False) -> None:
        """Show a text below the tables for a while."""
        if self._gone():
            return
        shown = self.query_one("#done", Static)
        shown.update(text)
        shown.set_classes(["shown", "failed"] if failed else ["shown"])
        if self._fading:
            self._fading.stop()
        self._fading = self.set_timer(20 if failed else 5, lambda: shown.set_classes([]))


def _fill(table: DataTable, rows: dict[str, tuple[str, ...]]) -> None:
    """Replace a table's rows; the cursor stays with its row where that is still there."""
    before = _chosen(table)
    if list(rows) == [str(key.value) for key in table.rows]:
        for key, cells in rows.items():
            for column, cell in zip(list(table.columns), _coloured(cells), strict=True):
                table.update_cell(key, column, cell, update_width=True)
        return
    table.clear()
    for key, cells in rows.items():
        table.add_row(*_coloured(cells), key=key)
    if before in rows:
        table.move_cursor(row=table.get_row_index(before))


def _coloured(cells: tuple[str, ...]) -> list[Text]:
    return [Text(cell, _PHASE_STYLES.get(cell.lower(), "")) for cell in cells]


def _chosen(table: DataTable) -> str:
    """Return the key of the row that the cursor is on, or nothing."""
    if not table.is_valid_row_index(table.cursor_row):
        return ""
    key = table.coordinate_to_cell_key(table.cursor_coordinate).row_key
    return key.value or ""
