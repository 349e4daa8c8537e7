"""What a dataset is, to show: `inspect`, `card`, and the page of `report`.

`overview` is what the manifest of a dataset tells: `inspect` shows it, or one sample, `card` makes
the README of datasets on the Hugging Face hub with it, and `plan` calculates with it. The page of a
report is for people to look at, and needs nothing but a browser:

1. `report` is the run: `datasets` opens what is given, picks samples by chance and reads them
   where they are. No shard is read whole.
2. `funnel` counts from receipts and rejects, and `distributions` measures such samples.
3. `contact_sheet` has the samples to show, `copies` groups of copies, `pictures` their pictures.
4. `page` collects all that the page states, and fills the template `page.html`, which
   escapes everything that comes from data.

`options` has the options of `inspect`, `report` and `card`.

In: Datasets.
Out: An overview, one sample, one HTML page, or a page of Markdown.
"""
