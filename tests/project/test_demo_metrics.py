"""The measures of the demo model, on small texts whose rates are plain to see."""

import numpy as np

from scripts.demo_model import metrics, packing
from scripts.demo_model.metrics import CopyIndex
from scripts.demo_model.packing import IGNORED_LABEL, TrainingText


def test_answers_must_be_exact_up_to_outer_space() -> None:
    given = ["It is red. ", "it is red.", "It is blue."]
    assert metrics.exact_answer_rate(given, ["It is red."] * 3) == 1 / 3


def test_known_words_ignore_case_and_marks() -> None:
    assert metrics.known_word_rate(['"The fox," it said.', "zyx"], {"the", "fox", "it"}) == 3 / 5


def test_repeats_are_found_across_marks() -> None:
    assert metrics.repeats_itself("One two, three. And one two three!", length=3)
    assert not metrics.repeats_itself("One two, three. And one two three!", length=4)
    assert not metrics.repeats_itself("One two", length=8)


def test_a_story_must_name_its_hero_and_the_animal() -> None:
    assert metrics.tells_about("There was a fox called Mia.", "Mia", "fox")
    assert not metrics.tells_about("There was a fox called Ben.", "Mia", "fox")


def test_copied_runs_are_found_anywhere_and_only_at_full_length() -> None:
    index = CopyIndex([np.arange(10), np.array([3]), np.arange(20, 40)], length=5)
    assert index.has_copied_run(np.array([99, 25, 26, 27, 28, 29, 98]))
    assert not index.has_copied_run(np.array([99, 25, 26, 27, 28, 97]))
    assert not index.has_copied_run(np.array([8, 9, 20, 21, 22]))
    assert not index.has_copied_run(np.array([1, 2]))


def _text(length: int) -> TrainingText:
    return TrainingText(np.arange(1, length + 1), np.arange(length) % 2 == 1)


def test_packing_keeps_texts_whole_and_loses_none() -> None:
    texts = [_text(length) for length in (7, 3, 5, 2, 6, 1)]
    windows = packing.pack(texts, 8)
    assert sorted(len(text) for window in windows for text in window) == [1, 2, 3, 5, 6, 7]
    assert all(sum(map(len, window)) <= 8 for window in windows)


def test_batches_label_only_what_is_trained() -> None:
    ((ids, labels),) = packing.batches([[_text(2), _text(2)]], 6, 1, pad_id=9)
    assert ids.tolist() == [[1, 2, 1, 2, 9, 9]]
    assert labels.tolist() == [[IGNORED_LABEL, 2, IGNORED_LABEL, 2, IGNORED_LABEL, IGNORED_LABEL]]
