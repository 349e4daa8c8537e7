"""Google Cloud Storage and Azure: `object_store` is the store, the other files are its parts."""
