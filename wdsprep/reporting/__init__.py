"""What a dataset is, to show: `inspect`, `card`, and the page of `report`.

`overview` is what the manifest of a dataset tells: `inspect` shows it, or one sample, `card` makes
the README of datasets on the Hugging Face hub with it, and `plan` calculates with it. The page of a
report is for people to look at, and needs nothing but a browser:

1. `report` is the run, and `facts` collects what the page states: counts from receipts, the rest
   from some samples, some rejects and the times of the receipts. No shard is read whole.
2. `sheet` has the samples to show: picked by chance, read where they are, with their latents.
3. `page` writes both as HTML, and escapes everything that comes from data.

`options` has the options of `inspect`, `report` and `card`.

In: Datasets.
Out: An overview, one sample, one HTML page, or a page of Markdown.
"""
