"""S3 and what speaks like it: `s3_store` is the store, and the other files are its parts."""
