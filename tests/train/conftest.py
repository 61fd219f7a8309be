"""One tiny target for all tests of training, and sequences that it wrote."""

import pytest
from train_kit import make_docs, make_target


@pytest.fixture(scope="session")
def model():
    return make_target()


@pytest.fixture(scope="session")
def docs(model):
    """Greedy texts, of which some are labelled as if they were sampled."""
    return make_docs(model, (0, 0.7, 1, 0, 0, 0.7, 1, 0))
