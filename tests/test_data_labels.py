"""Flipped labels, removed positives and divided rows: exact counts, reproducible, checked."""

import numpy as np
import pytest

from bilevax.data import flip_labels, remove_positives, split_rows

LABELS = np.where(np.arange(1000) % 4 == 0, 1, -1)


@pytest.mark.parametrize("fraction", [0, 0.1, 0.25, 0.4, 1])
def test_exactly_the_fraction_is_flipped_to_the_other_class(fraction):
    flipped, wrong = flip_labels(LABELS, fraction, seed=3)
    assert wrong.sum() == round(1000 * fraction)
    np.testing.assert_array_equal(flipped, np.where(wrong, -LABELS, LABELS))
    assert flipped.dtype == LABELS.dtype


def test_flips_among_several_classes_go_to_each_of_the_others():
    labels = np.array(["a", "b", "c"] * 1000)
    flipped, wrong = flip_labels(labels, 0.5, seed=0)
    assert ((flipped != labels) == wrong).all()
    to = flipped[wrong & (labels == "a")]
    assert 0.4 < np.mean(to == "b") < 0.6
    assert set(to) == {"b", "c"}


def test_the_seed_decides():
    assert (flip_labels(LABELS, 0.3, seed=1)[1] == flip_labels(LABELS, 0.3, seed=1)[1]).all()
    assert (flip_labels(LABELS, 0.3, seed=1)[1] != flip_labels(LABELS, 0.3, seed=2)[1]).any()
    assert (remove_positives(LABELS, seed=1) != remove_positives(LABELS, seed=2)).any()
    assert (split_rows(100, seed=1)[1] != split_rows(100, seed=2)[1]).any()


def test_seventy_percent_of_the_positives_go_and_no_negative():
    kept = remove_positives(LABELS, seed=0)
    assert np.count_nonzero(LABELS[kept] == 1) == 75
    assert np.count_nonzero(LABELS[kept] == -1) == 750
    assert (np.diff(kept) > 0).all()


@pytest.mark.parametrize("stratify", [False, True])
@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.333, 0.9])
def test_parts_are_disjoint_complete_and_of_the_exact_size(fraction, stratify):
    train, validation = split_rows(LABELS, fraction, seed=5, stratify=stratify)
    assert len(validation) == np.floor(1000 * fraction + 0.5)
    assert sorted([*train, *validation]) == list(range(1000))
    if stratify:
        assert abs(np.count_nonzero(LABELS[validation] == 1) - len(validation) / 4) < 1


def test_every_row_is_as_likely_as_any_other():
    chosen = sum(np.bincount(split_rows(50, 0.2, seed=s)[1], minlength=50) for s in range(400))
    # 400 draws with chance 0.2: the standard deviation is 8; the bounds are five of them.
    assert chosen.min() > 40
    assert chosen.max() < 120


BAD = {
    "a fraction above 1": (lambda: flip_labels(LABELS, 1.1, seed=0), "fraction must be a number from 0 to 1"),
    "nan as fraction": (lambda: flip_labels(LABELS, float("nan"), seed=0), "from 0 to 1, got nan"),
    "a word as fraction": (lambda: remove_positives(LABELS, "most", seed=0), "got 'most'"),
    "one class": (lambda: flip_labels(np.ones(3), 0.1, seed=0), "at least two classes"),
    "three classes": (lambda: remove_positives([1, 2, 3], seed=0), "two classes, got 3"),
    "lists of different lengths": (lambda: flip_labels([[1], [1, 2]], 0.1, seed=0), "must be a vector"),
    "a complex fraction": (lambda: split_rows(9, np.complex64(0.5), seed=0), "must be a number from 0 to 1"),
    "a huge fraction": (lambda: split_rows(9, 10**400, seed=0), "must be a number from 0 to 1"),
    "a matrix": (lambda: flip_labels(np.ones((2, 2)), 0.1, seed=0), "must be a vector"),
    "no rows": (lambda: flip_labels([], 0.1, seed=0), "at least one entry"),
    "nan as label": (lambda: flip_labels([1.0, np.nan], 0.1, seed=0), "finite numbers"),
    "an empty part": (lambda: split_rows(3, 0.01, seed=0), "leaves a part without rows"),
    "no labels to stratify by": (lambda: split_rows(10, seed=0, stratify=True), "stratify needs the labels"),
    "a negative seed": (lambda: split_rows(10, seed=-1), "seed must be a whole number"),
    "no number as seed": (lambda: split_rows(10, seed=None), "seed must be a whole number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()
