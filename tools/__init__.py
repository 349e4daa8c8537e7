"""A package, so that `tools.benches` is found here whatever else is called `tools`."""
