"""The tables of the documents are those of the code."""

import re
import shutil
from pathlib import Path

import pytest

from pipelines import doc_tables
from trainer.base.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path):
    """A copy of the documents that have tables."""
    for name in doc_tables.PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("page", doc_tables.PAGES)
def test_the_documents_are_current(page):
    text = (ROOT / page).read_text()
    assert doc_tables.with_tables(text) == text, "make tables"


def test_every_table_stands_in_a_document():
    documents = "".join((ROOT / page).read_text() for page in doc_tables.PAGES)
    assert sorted(re.findall(r"<!-- table: (.*?) \(", documents)) == sorted(doc_tables.TABLES)


def test_one_command_writes_them_anew(repository, capsys):
    page = repository / doc_tables.PAGES[0]
    right = page.read_text()
    page.write_text(right.replace("| `--nproc N` |", "| `--processes` |"))
    assert page.read_text() != right
    assert doc_tables.main(repository) == 0
    assert page.read_text() == right
    assert capsys.readouterr().out == f"wrote the tables of {page}\n"
    assert doc_tables.main(repository) == 0 and capsys.readouterr().out == ""


def test_it_says_what_it_lacks(repository, capsys):
    with pytest.raises(ConfigError, match="use one of: parameters of the pipeline, "):
        doc_tables.with_tables("<!-- table: lunch (make tables) -->\n<!-- end of the table -->")
    (repository / "README.md").unlink()
    assert doc_tables.main(repository) == 2
    assert "fix: call this in the root of the repository" in capsys.readouterr().err


def test_a_bar_in_a_text_is_no_end_of_a_cell():
    assert doc_tables._table(("a", "b"), [("x", "p | q")]).splitlines()[-1] == r"| x | p \| q |"
