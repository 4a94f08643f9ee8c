"""docs/iv_rl_in_an_hour.ipynb runs from top to bottom, its numbers are what its text says, its outputs are there."""

import re
import time
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOK = ROOT / "docs" / "iv_rl_in_an_hour.ipynb"
MAX_SECONDS = 300
MAX_BYTES = 1_000_000
SETUP = ("setup", "import-the-script")
# In place of ipywidgets: the function of a slider is called with its smallest and its largest value.
SLIDER = """
from types import SimpleNamespace

def FloatSlider(value, min, max, step):
    return SimpleNamespace(min=min, max=max)

def interact(function, mebs_ratio):
    function(mebs_ratio.min)
    function(mebs_ratio.max)
"""
PATHS = re.compile(r"/(root|home|tmp|work|var|usr|opt|mnt|Users)/|[A-Z]:\\|site-packages")


def read_notebook(*cell_ids: str) -> NotebookNode:
    """The committed notebook, or some of its cells."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if cell_ids:
        notebook.cells = [cell for cell in notebook.cells if cell.id in cell_ids]
        assert len(notebook.cells) == len(cell_ids)
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Runs the cells in a new kernel, started in a folder; what was committed of outputs is gone."""
    for cell in code_cells(notebook):
        cell.outputs = []
        cell.execution_count = None
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook, timeout=MAX_SECONDS, kernel_name="python3", coalesce_streams=True, resources=resources
    )
    client.execute()


def texts(cell: NotebookNode) -> str:
    """All that a cell shows, but for its pictures."""
    shown = []
    for output in cell.outputs:
        if output.output_type == "stream":
            shown.append(output.text)
        else:
            shown += [str(value) for kind, value in output.data.items() if not kind.startswith("image/")]
    return "\n".join(shown)


def count_pictures(cell: NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def tables(notebook: NotebookNode) -> dict[str, dict[str, list[float]]]:
    """The printed tables: cell, name of the row, its numbers."""
    found = {}
    for cell in code_cells(notebook):
        rows = {}
        for line in texts(cell).splitlines():
            name, *columns = re.split(r"\s{2,}", line.strip())
            if columns and all(re.fullmatch(r"-?\d+\.\d+", column) for column in columns):
                rows[name] = [float(column) for column in columns]
        found[cell.id] = rows
    return found


def check_outputs(notebook: NotebookNode) -> None:
    """Each code cell has run, in order, and shows something; no error, no warning, no path of a machine."""
    cells = code_cells(notebook)
    assert len(cells) >= 10
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert cell.outputs, cell.id
        for output in cell.outputs:
            assert output.output_type in ("stream", "display_data", "execute_result"), cell.id
            assert output.get("name") != "stderr", output.text
        assert not PATHS.search(texts(cell)), cell.id
        assert count_pictures(cell) == 1 or not cell.id.endswith("-picture"), cell.id


def check_regression(rows: dict[str, list[float]]) -> None:
    error = {name: values[0] for name, values in rows.items()}
    assert error["BIV, MEBS 0.9 K"] < 0.8 * error["L2"]
    assert error["BIV, MEBS 0.5 K"] < 0.5 * error["L2"]
    assert error["oracle"] < 0.5 * error["L2"]
    assert error["BIV, MEBS 0.5 K"] < error["oracle"]
    assert error["BIV, MEBS 0.5 K, rough"] < 0.7 * error["BIV, xi 0, rough"]
    assert rows["L2"][2] == 64
    assert rows["BIV, MEBS 0.5 K"][2] == 32


def check_batch(rows: dict[str, list[float]]) -> None:
    for kind, count in (("xi ", 5), ("MEBS ", 6)):
        xi, ebs, largest_weight = zip(*(row for name, row in rows.items() if name.startswith(kind)), strict=True)
        assert len(xi) == count
        assert list(xi) == sorted(set(xi))
        assert list(ebs) == sorted(set(ebs))
        assert list(largest_weight) == sorted(set(largest_weight), reverse=True)
    for ratio in (0.25, 0.5, 0.75, 0.9):
        assert rows[f"MEBS {ratio:g} K"][1] == pytest.approx(64 * ratio, abs=0.01)
    assert rows["MEBS 0.1 K"] == rows["xi 0"]  # enough samples count without xi
    assert rows["MEBS 0.99 K"][1] == pytest.approx(63, abs=0.01)  # never above K - 1
    assert 9 <= rows["xi 0"][1] < 10  # "nine samples of 64 count
    assert rows["xi 0"][2] == pytest.approx(0.2, abs=0.01)  # and one has a fifth of the weight"


def check_mixture(rows: dict[str, list[float]]) -> None:
    for _, aleatoric, epistemic, mixture in rows.values():
        assert mixture == pytest.approx(aleatoric + epistemic, abs=2e-4)
    for place in ("quiet data", "noisy data"):
        noise, aleatoric, epistemic, _ = rows[place]
        assert aleatoric == pytest.approx(noise, rel=0.3)
        assert epistemic < 0.1 * aleatoric
        assert epistemic < 0.3 * rows["gap"][2]
    assert rows["quiet data"][1] < rows["gap"][1] < rows["noisy data"][1]


def check_training(found: dict[str, dict[str, list[float]]]) -> None:
    first, last, lowest_ebs, highest_ebs = found["training-run"]["IV-DQN"]
    assert last > max(50, 3 * first)
    assert lowest_ebs == pytest.approx(0.9 * 64, abs=0.01)
    assert highest_ebs < 64
    shares = found["training-weights"]
    assert shares["share of weight of the most uncertain tenth"][0] < 0.08
    assert shares["share of weight of the most certain tenth"][0] > 0.105
    first, last, lowest_ebs, highest_ebs = found["fork-run"]["ranks"]
    assert last > max(50, 3 * first)
    assert lowest_ebs == highest_ebs == 48.37


def check(notebook: NotebookNode) -> None:
    check_outputs(notebook)
    found = tables(notebook)
    check_regression(found["regression-fit"])
    check_batch(found["batch-numbers"])
    check_mixture(found["mixture-fit"])
    check_training(found)


def test_the_committed_notebook_shows_what_its_text_says():
    assert NOTEBOOK.stat().st_size < MAX_BYTES
    check(read_notebook())


def test_the_notebook_runs_from_top_to_bottom():
    notebook = read_notebook()
    committed = tables(notebook)
    start = time.time()
    execute(notebook, NOTEBOOK.parent)
    assert time.time() - start < MAX_SECONDS
    check(notebook)
    assert not (NOTEBOOK.parent / "runs").exists()
    # What was committed comes from this code: exactly where nothing is trained, roughly where something is.
    executed = tables(notebook)
    for cell_id, tolerance in {"batch-numbers": 1e-3, "regression-fit": 0.5}.items():
        assert executed[cell_id].keys() == committed[cell_id].keys()
        for name, row in committed[cell_id].items():
            assert executed[cell_id][name] == pytest.approx(row, rel=tolerance), name


@pytest.mark.parametrize("folder", [ROOT, ROOT / "docs"], ids=["root", "docs"])
def test_the_script_is_found_from(folder: Path):
    notebook = read_notebook(*SETUP)
    execute(notebook, folder)
    assert "IV-DQN" in texts(notebook.cells[1])


def test_the_slider_where_there_are_widgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "ipywidgets.py").write_text(SLIDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    notebook = read_notebook(*SETUP, "batch-numbers", "batch-picture")
    execute(notebook, ROOT)
    assert "slider" in texts(notebook.cells[-1])
    assert count_pictures(notebook.cells[-1]) == 2  # at both ends


def test_each_section_ends_in_a_question():
    text = "\n".join(cell.source for cell in read_notebook().cells if cell.cell_type == "markdown")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert len(sections) == 5
    for section in sections:
        last = section.strip().split("\n\n")[-1]
        assert last.startswith(("**Question.**", "**Exercise.**")), section[:40]
