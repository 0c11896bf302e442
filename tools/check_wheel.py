"""Reads a wheel's native modules, for systems on which they cannot be tried: `make wheel` does.

    python tools/check_wheel.py WHEEL MPI_WHEEL...

Each module must export one symbol, which Python calls, need no library but the system's own, and
find everything else that it uses in Python or in one of the MPIs, which are loaded before it.
It needs lief, which reads the formats of Linux and macOS.
"""

import ctypes
import fnmatch
import sys
import zipfile
from typing import Any

import lief

SYSTEM = {
    "ELF": ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux*"),
    "MACHO": ("/usr/lib/libSystem.B.dylib",),
}


def parse(data: bytes) -> Any:
    """Return a binary; of a file for several processors, the first."""
    lief.logging.disable()
    return lief.parse(list(data))


def plain(name: str, kind: str) -> str:
    """Return a symbol as C writes it, without the version of Linux's or the underscore of
    macOS's."""
    return name.partition("@")[0] if kind == "ELF" else name.removeprefix("_")


def kind_of(binary: Any) -> str:
    return "ELF" if isinstance(binary, lief.ELF.Binary) else "MACHO"


def exports(binary: Any) -> set[str]:
    kind = kind_of(binary)
    if kind == "ELF":
        return {plain(symbol.name, kind) for symbol in binary.exported_symbols}
    tries = [binary.dyld_info] if binary.has_dyld_info else [binary.dyld_exports_trie]
    return {plain(export.symbol.name, kind) for trie in tries for export in trie.exports}


def libraries(binary: Any) -> set[str]:
    if kind_of(binary) == "ELF":
        return set(binary.libraries)
    own = lief.MachO.LoadCommand.TYPE.ID_DYLIB
    return {library.name for library in binary.libraries if library.command != own}


def from_elsewhere(binary: Any) -> set[str]:
    """Symbols without the name of a library."""
    kind = kind_of(binary)
    if kind == "ELF":
        undefined = [s for s in binary.dynamic_symbols if s.name and s.shndx == 0]
        return {
            plain(symbol.name, kind)
            for symbol in undefined
            if symbol.binding != lief.ELF.Symbol.BINDING.WEAK
            and not (symbol.has_version and symbol.symbol_version.has_auxiliary_version)
        }
    return {plain(entry.symbol.name, kind) for entry in binary.bindings if not entry.has_library}


def faults(module: Any, mpis: list[set[str]]) -> list[str]:
    """Return what is wrong with a module, given the exports of each MPI."""
    said = []
    if exports(module) != {"PyInit__native"}:
        said.append(f"it exports {sorted(exports(module))}, expected PyInit__native alone")
    system = SYSTEM[kind_of(module)]
    others = [n for n in libraries(module) if not any(fnmatch.fnmatch(n, s) for s in system)]
    if others:
        said.append(f"it needs {others}, expected no library but the system's")
    used = from_elsewhere(module)
    mpi = {name for name in used if not hasattr(ctypes.pythonapi, name)}
    missing = min((mpi - exported for exported in mpis), key=len)
    if not mpi:
        said.append("it uses no MPI")
    elif missing:
        said.append(f"no MPI has all that it uses: {sorted(missing)}")
    return said


def main(wheel: str, *mpi_wheels: str) -> None:
    def members(file: str, pattern: str) -> dict[str, bytes]:
        with zipfile.ZipFile(file) as archive:
            return {n: archive.read(n) for n in archive.namelist() if fnmatch.fnmatch(n, pattern)}

    # Beside libraries there are texts that name them.
    parsed = [parse(data) for file in mpi_wheels for data in members(file, "*/libmpi*").values()]
    mpis = [exports(binary) for binary in parsed if binary is not None]
    modules = members(wheel, "*/_native_*.so")
    said = [f"{n}: {fault}" for n, data in modules.items() for fault in faults(parse(data), mpis)]
    if len(modules) != 3:
        said.append(f"it has {len(modules)} native modules, expected 3")
    if said:
        sys.exit("\n".join([wheel, *said]))
    print(f"{wheel}: {len(modules)} modules are as they must be")


if __name__ == "__main__":
    main(*sys.argv[1:])
