"""Which sample comes when: `global_order` is the whole, and the other files are its parts."""
