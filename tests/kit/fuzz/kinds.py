"""All kinds of cases, by whose files are changed."""

from tests.kit.fuzz import datasets, foreign, lists, models, tars

KINDS = (*foreign.KINDS, *models.KINDS, *datasets.KINDS, *lists.KINDS, *tars.KINDS)
