"""The page of a report: facts and samples as HTML that needs no network."""
