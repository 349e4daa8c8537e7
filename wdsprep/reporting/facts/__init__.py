"""What can be told of datasets, before any of it is shown."""
