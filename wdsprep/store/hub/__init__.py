"""The Hugging Face hub: `hub_store` is the store, and the other files are its parts."""
