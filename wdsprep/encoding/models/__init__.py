"""Models: found by name, loaded onto a device, run in batches."""
