"""All kinds of cases, by whose files are changed."""

from tests.kit.fuzz import datasets, strangers

KINDS = (*strangers.KINDS, *datasets.KINDS)
