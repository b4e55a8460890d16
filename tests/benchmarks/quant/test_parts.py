"""An interrupted run goes on, and only where it is asked to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.benchmarks.quant.inputs import Text
from tierkv.benchmarks.quant.parts import Parts
from tierkv.benchmarks.quant.quality import Loss

TEXT = Text("prose", "types", [1, 2, 3])
OTHERS = [Text("code", "difflib", [4, 5]), Text("prose", "compound", [6])]
LOSS = Loss(0.125, 0.5, 0.25, [0.0625])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "new" / "quant.parts"
    parts = Parts(file, OTHERS, resume=False)
    parts.of(TEXT)["k3v2"] = LOSS
    parts.keep()
    return file


def test_what_was_measured_is_found_again_for_the_same_tokens_only(file: Path) -> None:
    parts = Parts(file, OTHERS, resume=True)
    assert parts.of(TEXT) == {"k3v2": LOSS}
    assert parts.of(TEXT._replace(tokens=[1, 2])) == {}


def test_what_codecs_were_fitted_on_other_texts_is_measured_anew(file: Path) -> None:
    for others in (OTHERS[:1], [*OTHERS, TEXT], [OTHERS[0], OTHERS[1]._replace(tokens=[7])]):
        assert Parts(file, others, resume=True).of(TEXT) == {}


def test_a_run_that_does_not_resume_starts_from_nothing(file: Path) -> None:
    assert Parts(file, OTHERS, resume=False).of(TEXT) == {}


def test_a_damaged_file_is_told_and_not_used(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_bytes(file.read_bytes()[:-5])
    assert Parts(file, OTHERS, resume=True).of(TEXT) == {}
    assert str(file) in caplog.text
