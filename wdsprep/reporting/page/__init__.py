"""The page: facts and samples as HTML that needs no network."""
