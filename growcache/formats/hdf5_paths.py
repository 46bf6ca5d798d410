"""Find groups and datasets of an HDF5 file, by links that stay inside the file."""

from __future__ import annotations

from typing import Any

from growcache.errors import FormatError

MOST_LINKS = 64  # from the root to a dataset, soft ones included
MOST_SHOWN_NAMES = 8  # datasets that an error lists
MOST_SEARCHED_NAMES = 1000  # names that are visited to list a file's datasets
MOST_SHOWN_CHARACTERS = 40
MOST_GROUPS = 1 << 20  # samples of a file
MOST_FIELDS = 256  # datasets of a group
_BARE_DIMENSION = b"This is a netCDF dimension but not a netCDF variable"


def names_at_root(file: Any, key: str) -> list[str]:
    """Return the names at the root, without links out of the file."""
    import h5py

    if len(file) > 1000:
        raise FormatError(
            f"{key}: {len(file)} names at its root; set source.options.datasets", code="GC303"
        )
    return [
        name
        for name in file
        if isinstance(file.get(name, getlink=True), h5py.HardLink)
        # Not by class, because that would read the whole index of its chunks.
        and _is_variable(h5py.h5o.open(file.id, name.encode()))
    ]


def _is_variable(found: Any) -> bool:
    """Whether the object is a dataset, rather than netCDF's note of a dimension without values."""
    import h5py

    if not isinstance(found, h5py.h5d.DatasetID):
        return False
    if not h5py.h5a.exists(found, b"NAME"):
        return True
    kind = h5py.h5a.open(found, b"NAME").get_type()
    if not isinstance(kind, h5py.h5t.TypeStringID) or kind.is_variable_str():
        return True
    said = h5py.Dataset(found).attrs["NAME"]
    return not (isinstance(said, bytes) and said.startswith(_BARE_DIMENSION))


def group_names(file: Any, parent: str) -> tuple[str, ...]:
    """Return the names of the groups in a folder, without opening each."""
    import h5py

    at = file["/"]
    for part in _path_parts(parent):
        link = at.get(part, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise FormatError(f"no group at {parent!r:.{MOST_SHOWN_CHARACTERS}}", code="GC303")
        at = _checked_group(h5py.h5o.open(at.id, part.encode()), parent)
    if len(at) > MOST_GROUPS:
        raise FormatError(f"{len(at):,} groups, of at most {MOST_GROUPS:,}", code="GC305")
    return tuple(at)


def group_at(file: Any, path: str) -> Any:
    """Return the group at a path of hard links, or None."""
    import h5py

    at = file["/"]
    for part in _path_parts(path):
        link = at.get(part, getlink=True) if isinstance(at, h5py.Group) else None
        if not isinstance(link, h5py.HardLink):
            return None
        found = h5py.h5o.open(at.id, part.encode())
        if not isinstance(found, h5py.h5g.GroupID):
            return None
        at = h5py.Group(found)
    return at


def paths_in_group(file: Any, group: str) -> list[str]:
    """Return the datasets in a group and its sub-groups."""
    import h5py

    at = file["/"]
    for part in _path_parts(group):
        at = _checked_group(h5py.h5o.open(at.id, part.encode()), group)
    found = [one.removeprefix("/") for one in dataset_paths(at)]
    if len(found) > MOST_FIELDS:
        raise FormatError(
            f"group {group!r:.{MOST_SHOWN_CHARACTERS}} has more than {MOST_FIELDS} datasets; set "
            "source.options.datasets",
            code="GC303",
        )
    return found


def dataset_paths(file: Any) -> list[str]:
    """Return the first datasets that are found, starting next to the root."""
    import h5py

    found: list[str] = []
    groups, looked = [("", file["."])], 0
    for folder, group in groups:  # grows meanwhile
        for name in group:
            looked += 1
            if looked > MOST_SEARCHED_NAMES:
                return found
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                continue
            kind = group.get(name, getclass=True)
            if kind is h5py.Dataset:
                found.append(folder + name)
            elif kind is h5py.Group:
                groups.append((f"{folder}{name}/", group[name]))
    return found


def dataset_at(file: Any, path: str) -> Any:
    """Return the dataset at a path. Links are followed one by one, and none out of the file."""
    import h5py

    at, left = file["/"], _path_parts(path)
    for _ in range(MOST_LINKS):
        if not left:
            break
        name = left.pop(0)
        link = at.get(name, getlink=True) if isinstance(at, h5py.Group) else None
        if isinstance(link, h5py.SoftLink):
            target = link.path
            at = file["/"] if target.startswith("/") else at
            left = _path_parts(target) + left
        elif isinstance(link, h5py.HardLink):
            at = h5py.h5o.open(at.id, name.encode())
            at = (
                h5py.Dataset(at)
                if isinstance(at, h5py.h5d.DatasetID)
                else _checked_group(at, path)
            )
        elif link is not None:
            raise FormatError(
                f"a link out of the file at {path!r:.{MOST_SHOWN_CHARACTERS}}, never followed",
                code="GC304",
            )
        else:
            raise FormatError(_no_dataset_message(file, path), code="GC303")
    if left or not isinstance(at, h5py.Dataset):
        raise FormatError(_no_dataset_message(file, path), code="GC303")
    return at


def _checked_group(found: Any, path: str) -> Any:
    import h5py

    if isinstance(found, h5py.h5g.GroupID):
        return h5py.Group(found)
    raise FormatError(f"no dataset at {path!r:.{MOST_SHOWN_CHARACTERS}}", code="GC303")


def _path_parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _no_dataset_message(file: Any, path: str) -> str:
    names = ", ".join(
        f"{name!r:.{MOST_SHOWN_CHARACTERS}}" for name in list(file)[:MOST_SHOWN_NAMES]
    )
    return f"no dataset at {path!r:.{MOST_SHOWN_CHARACTERS}}; at the root are {names or 'none'}"
