"""Pick, read, decode and draw the samples that a report shows."""
