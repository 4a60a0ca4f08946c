from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhaprune.text.windows import Window, make_windows


@st.composite
def texts_and_windows(draw):
    """(num_tokens, context_length, stride), for a text of more than one window."""
    context_length = draw(st.integers(2, 12))
    stride = draw(st.integers(1, context_length))
    num_tokens = context_length + draw(st.integers(1, 60))
    return num_tokens, context_length, stride


def scored_tokens(windows):
    return [token for window in windows for token in range(window.first_scored, window.stop)]


def hugging_face_windows(num_tokens, context_length, stride):
    """The loop of Hugging Face's guide, on labels: (inputs read, labels left after the shift)."""
    result, previous_end = [], 0
    for begin in range(0, num_tokens, stride):
        end = min(begin + context_length, num_tokens)
        num_targets = end - previous_end
        labels = list(range(begin, end))
        labels[:-num_targets] = [-100] * (len(labels) - num_targets)
        shifted = [label for label in labels[1:] if label != -100]
        result.append((range(begin, end), shifted))
        previous_end = end
        if end == num_tokens:
            break
    return result


@pytest.mark.parametrize(
    ("num_tokens", "context_length", "stride", "expected"),
    [
        (5, 4, 4, [(0, 5, 1)]),
        (9, 4, 4, [(0, 5, 1), (4, 9, 5)]),
        (10, 4, 4, [(0, 5, 1), (4, 9, 5), (5, 10, 9)]),
        (10, 4, 2, [(0, 5, 1), (2, 7, 5), (4, 9, 7), (5, 10, 9)]),
        (7, 4, 1, [(0, 5, 1), (1, 6, 5), (2, 7, 6)]),
        (8, 4, 3, [(0, 5, 1), (3, 8, 5)]),
        (3, 1, 1, [(0, 2, 1), (1, 3, 2)]),
    ],
)
def test_golden_windows(num_tokens, context_length, stride, expected):
    assert make_windows(num_tokens, context_length, stride) == [Window(*w) for w in expected]


@pytest.mark.parametrize(
    ("num_tokens", "context_length", "stride", "expected"),
    [
        (4, 4, 4, [(0, 4, 1)]),
        (8, 4, 4, [(0, 4, 1), (4, 8, 5)]),
        (9, 4, 4, [(0, 4, 1), (4, 8, 5)]),
        (10, 4, 4, [(0, 4, 1), (4, 8, 5), (8, 10, 9)]),
        (9, 4, 2, [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 9, 8)]),
        (6, 4, 3, [(0, 4, 1), (3, 6, 4)]),
    ],
)
def test_golden_windows_with_the_first_token_unscored(num_tokens, context_length, stride, expected):
    windows = make_windows(num_tokens, context_length, stride, first_token="unscored")
    assert windows == [Window(*w) for w in expected]


def test_a_window_reads_one_token_less_than_it_holds():
    window = Window(start=2, stop=7, first_scored=5)
    assert window.num_inputs == len([2, 3, 4, 5])
    assert window.num_scored == len([5, 6])


@given(texts_and_windows())
def test_every_token_but_the_first_is_scored_exactly_once(text):
    num_tokens, _, _ = text
    assert Counter(scored_tokens(make_windows(*text))) == Counter(range(1, num_tokens))


@given(texts_and_windows())
def test_every_scored_token_has_the_context_that_the_stride_promises(text):
    _, context_length, stride = text
    for window in make_windows(*text):
        assert window.num_inputs <= context_length
        for token in range(window.first_scored, window.stop):
            assert token - window.start >= min(token, context_length - stride + 1)


@given(texts_and_windows())
def test_the_unscored_convention_is_the_hugging_face_loop(text):
    num_tokens, context_length, stride = text
    ours = make_windows(num_tokens, context_length, stride, first_token="unscored")
    theirs = [window for window in hugging_face_windows(*text) if window[1]]
    assert [(range(w.start, w.stop), list(range(w.first_scored, w.stop))) for w in ours] == theirs


@given(texts_and_windows())
def test_unscored_first_tokens_are_all_that_the_conventions_differ_by(text):
    num_tokens, context_length, stride = text
    scored = scored_tokens(make_windows(*text, first_token="unscored"))
    skipped = range(0, num_tokens, stride) if stride == context_length else [0]
    assert scored == [token for token in range(num_tokens) if token not in skipped]


def test_the_published_gpt2_number_averages_281_windows():
    windows = make_windows(287_644, 1024, 1024, first_token="unscored")
    assert len(windows) == 281
    assert sum(window.num_scored for window in windows) == 287_644 - 281


@pytest.mark.parametrize(
    ("arguments", "first_token", "message"),
    [
        ((100, 8, 0), "scored", "stride must be from 1 to the context_length 8.* got 0"),
        ((100, 8, 9), "scored", "stride must be from 1 to the context_length 8.* got 9"),
        ((100, 0, 1), "scored", "context_length must be at least 1 .* got 0"),
        ((100, 1, 1), "unscored", "context_length must be at least 2 .* got 1"),
        ((0, 8, 8), "scored", "the text is empty: it has 0 token"),
        ((1, 8, 8), "unscored", "the text is empty: it has 1 token"),
        ((8, 8, 8), "scored", "has 8 tokens, but one window takes 9; .* evaluation.context_length"),
        ((7, 8, 8), "unscored", "has 7 tokens, but one window takes 8; .* longer text"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(arguments, first_token, message):
    with pytest.raises(ValueError, match=message) as error:
        make_windows(*arguments, first_token=first_token)
    assert "\n" not in str(error.value)
