"""Units of work as Ray actors: all that imports Ray but for streaming."""
