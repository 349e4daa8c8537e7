"""The names of a tar's members: the key and the field in a name, and keys that are unsafe."""


def split_member(name: str) -> tuple[str, str] | None:
    """Split the name of a member into key and field, at the first dot of its base name.

    The field comes in lower case. webdataset does the same. Return None if nothing stands before
    the dot or behind it.
    """
    folder, slash, base = name.rpartition("/")
    stem, _, field_name = base.partition(".")
    return (folder + slash + stem, field_name.lower()) if stem and field_name else None


def leads_out(key: str) -> bool:
    """Return whether a key leads out of the folder into which its tar is unpacked."""
    return key.startswith("/") or (".." in key and ".." in key.split("/"))
