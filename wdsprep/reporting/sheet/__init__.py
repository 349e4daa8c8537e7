"""The samples that a report shows: picked, read, decoded, drawn."""
