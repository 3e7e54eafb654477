from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from orchestrator.views.terminal.frame import MOST_RUNNING, abridged, columns, fitted, frame, row

WORDS = st.text(st.sampled_from("ab 9é网絡🙂\n"), max_size=40)


@given(
    st.lists(WORDS, max_size=3),
    st.dictionaries(WORDS, st.lists(WORDS, max_size=20), max_size=4),
    st.lists(st.tuples(WORDS, WORDS, st.just("1:00")), max_size=20),
    st.integers(1, 200),
    st.integers(0, 50),
)
def test_nothing_is_wider_or_taller_than_the_terminal(
    head: list[str], axes: dict[str, list[str]], running: list[tuple[str, str, str]], width: int, height: int
) -> None:
    lines = frame(head, axes, running, width, height)

    assert len(lines) <= height
    assert all(cell_len(line) <= width and "\n" not in line for line in lines)


def test_a_wide_character_is_never_cut_in_half() -> None:
    assert fitted("剪枝剪枝", 8) == "剪枝剪枝"
    assert fitted("剪枝剪枝", 7) == "剪枝 .."
    assert fitted("剪枝剪枝", 6) == "剪枝.."
    assert abridged("剪枝剪枝剪枝 seed=1", 13) == "剪枝.. seed=1"


def test_values_that_do_not_fit_are_counted() -> None:
    values = [f"{n} 1/2" for n in range(10)]

    assert row("seed", values, 80, 1) == ["seed  0 1/2  1 1/2  2 1/2  3 1/2  4 1/2  5 1/2  6 1/2  7 1/2  8 1/2  9 1/2"]
    assert row("seed", values, 33, 1) == ["seed  0 1/2  1 1/2  and 8 more"]
    assert row("seed", values, 33, 2) == ["seed  0 1/2  1 1/2  2 1/2  3 1/2", "      4 1/2  5 1/2  and 4 more"]


def test_of_running_stages_the_time_is_never_cut_and_the_rest_are_counted() -> None:
    told = "34%, validation accuracy 91%"
    running = [(f"l1_unstructured sparsity=0.5 seed={n}, round 2/3", told, "1:00:07") for n in (7, 8)]

    assert columns(running, 80, 5) == [
        "l1_unstructur..sity=0.5 seed=7, round 2/3  34%, validation accuracy 91%  1:00:07",
        "l1_unstructur..sity=0.5 seed=8, round 2/3  34%, validation accuracy 91%  1:00:07",
    ]
    assert columns(running[:1], 60, 5) == ["l1_unstr..d=7, round 2/3  34%, validation accurac..  1:00:07"]
    assert columns(running * 3, 200, 3)[-1] == "and 4 more run"
    assert columns(running, 200, 1) == ["2 stages run"]
    assert columns(running, 200, 0) == []


def test_a_low_terminal_shows_what_runs_before_all_else() -> None:
    running = [("a", "b", "0:01")] * 20
    lines = frame(["counts", "trials", "best"], {"method": ["x 1/2"], "seed": ["0 1/2"]}, running, 40, 5)

    assert lines == ["counts", "trials", "a  b  0:01", "a  b  0:01", "and 18 more run"]


def test_stages_that_are_not_listed_are_counted() -> None:
    running = [(f"stage {n}", "", "0:01") for n in range(MOST_RUNNING)]

    lines = frame(["head"], {}, running, 40, 40, more=8000)

    assert len(lines) == 1 + MOST_RUNNING
    assert lines[-1] == "and 8001 more run"
